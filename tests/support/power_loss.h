// What a disk may hold after the power went: the calls of a run are recorded, and what was not forced to disk may be
// there, in part, or not at all, each call for itself.
//
// The model is harsher than the file systems that are used: names that were made or taken away are lost one by one, in
// any order, until their directory is forced to disk, though it be that of a file that was forced to disk itself. Of a
// write any of the disk's units of 512 bytes may be missing. Two things hold: a rename happens or does not, and is for
// good when either of its directories is; nothing is lost that was forced to disk.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "lib/base/syscalls.h"

namespace reshard {

// A directory and all that is in it. Nodes refer to each other by their numbers; 0 is the directory itself.
struct DiskState {
  struct Node {
    bool is_directory = false;
    std::string bytes;
    std::map<std::string, int> entries;
  };
  std::vector<Node> nodes;

  static DiskState read(const std::string& directory);
  // Makes the directory hold this and nothing else.
  void write(const std::string& directory) const;
  // Of the names and bytes that can be reached from 0.
  std::uint64_t hash() const;
};

struct DiskOperation {
  enum class Kind { kMake, kRemove, kMove, kExchange, kWrite, kLength, kSync };
  Kind kind{};
  int node = 0;               // that is made, removed, moved, written, forced to disk
  bool is_directory = false;  // the node
  int directory = 0, to = 0;  // where its name is; where it is moved to, or changes places with `other`
  int other = -1;
  std::string name, to_name;
  std::uint64_t offset = 0;  // or length
  std::string bytes;

  std::string text() const;
};

// Records what is done below a directory while it lives. Forces nothing to disk. One at a time; thread-safe.
class DiskRecorder {
 public:
  explicit DiskRecorder(const std::string& directory);
  ~DiskRecorder();
  DiskRecorder(const DiskRecorder&) = delete;
  DiskRecorder& operator=(const DiskRecorder&) = delete;

  const DiskState& before() const;
  const std::vector<DiskOperation>& operations() const;
  struct Recording;

 private:
  std::unique_ptr<Recording> recording_;
  std::optional<ScopedSyscalls> scoped_;
};

// What has become of a call that was not forced to disk.
enum class Fate { kDone, kLost, kTorn };

// The operations before `end` that nothing before it forces to disk. `lies`: nothing ever does.
std::vector<int> open_operations(const std::vector<DiskOperation>& all, int end, bool lies = false);
// What the disk holds after the first `end` of them; the fate of each of `open`, done for the others. `random` says how
// writes are torn.
DiskState state_after(const DiskState& before, const std::vector<DiskOperation>& all, int end,
                      const std::vector<int>& open, const std::vector<Fate>& fates, std::mt19937& random);

}  // namespace reshard
