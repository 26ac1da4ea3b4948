// SPDX-License-Identifier: Apache-2.0
#include "tools/commands.h"

int main(int argc, char** argv) { return reshard::tools::run_program(argc, argv, true); }
