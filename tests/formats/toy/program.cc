// reshard with an additional format.
#include "formats/registry.h"
#include "tests/formats/toy/toy.h"
#include "tools/commands.h"

int main(int argc, char** argv) {
  reshard::formats().add(reshard::kToyFormat);
  return reshard::tools::run_program(argc, argv);
}
