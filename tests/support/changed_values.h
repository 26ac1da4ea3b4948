// Pickles with one value replaced by another: damage that random byte flips rarely produce.
#pragma once

#include <string>
#include <vector>

namespace reshard {

struct ChangedPickle {
  std::string place;  // path of the value: "root.state.0.exp_avg.args.0"
  std::string value;  // the new value: "None"
  std::string bytes;
};

// Returns the pickle (protocols 2 to 5) once for each value and replacement: None, a number, a negative number, one of
// more than 64 bits, a text, and an empty list, dict and tuple. Of containers only the first elements or members are
// replaced, and no value that a later opcode refers to. Throws std::runtime_error for opcodes that no test checkpoint
// contains.
std::vector<ChangedPickle> changed_pickles(const std::string& pickle);

// Returns the pickle of a torch.save file, or the whole file if it is a pickle.
std::string pickle_of(const std::string& file);
// Returns the file with another pickle, with a matching checksum and directory.
std::string with_pickle(const std::string& file, const std::string& pickle);

}  // namespace reshard
