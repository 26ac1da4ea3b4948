// A pickle with one of its values exchanged for another: damage that any byte may be, without the search for it.
#pragma once

#include <string>
#include <vector>

namespace reshard {

struct ChangedPickle {
  std::string place;  // of the value: "root.state.0.exp_avg.args.0"
  std::string value;  // that stands there now: "None"
  std::string bytes;
};

// Every value of the pickle (protocols 2 to 5) as None, a number, a negative one, one of more than 64 bits, a text, and
// an empty list, dict and tuple. Of lists and tuples the first elements, of dicts the first members; no value that a
// later one refers to. Throws std::runtime_error for opcodes that no checkpoint of the tests has.
std::vector<ChangedPickle> changed_pickles(const std::string& pickle);

// The pickle of what torch.save wrote, or the file itself where it is a pickle.
std::string pickle_of(const std::string& file);
// The file with another pickle, checksums and directory as they should be.
std::string with_pickle(const std::string& file, const std::string& pickle);

}  // namespace reshard
