// The expected tensors of checkpoints from other programs, as digests: {"name": ["BF16", [257, 64], "SHA-256 in hex"],
// ...}.
#pragma once

#include <map>
#include <string>

#include "tests/support/checkpoints.h"

namespace reshard {

// Returns each tensor as a line of text, "BF16 [257, 64] SHA-256".
std::map<std::string, std::string> digests_of(const TensorValues& values);
// Reads a file of digests in the same form. Fails the test if it cannot be read.
std::map<std::string, std::string> read_digests(const std::string& path);
// Returns the digests in the manifest of an output, by name. Fails the test if there is none.
std::map<std::string, std::string> manifest_digests(const std::string& directory);

}  // namespace reshard
