// Truths of checkpoints that other programs wrote, as digests: {"name": ["BF16", [257, 64], "SHA-256 in hex"], ...}.
#pragma once

#include <map>
#include <string>

#include "tests/support/checkpoints.h"

namespace reshard {

// Each tensor as one line of text, "BF16 [257, 64] SHA-256".
std::map<std::string, std::string> digests_of(const TensorValues& values);
// The same of a file of digests. Fails the test where it cannot be read.
std::map<std::string, std::string> read_digests(const std::string& path);

}  // namespace reshard
