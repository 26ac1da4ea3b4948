// Simulates the state of a disk after a power loss. Records the file system calls of a run; the effect of each call
// that was not yet synced may be on the disk completely, partly, or not at all, independently of the others.
//
// The model is harsher than real file systems:
// - Created and removed names may be lost one by one, in any order, until their directory is synced, even if the file
//   itself was synced.
// - Of an unsynced write, any of the disk's 512-byte sectors may be missing.
// It guarantees two things: a rename happens completely or not at all, and is durable once either of its directories
// is synced; and synced data is never lost.
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

// A directory and everything below it. Nodes refer to each other by index; node 0 is the directory itself.
struct DiskState {
  struct Node {
    bool is_directory = false;
    std::string bytes;
    std::map<std::string, int> entries;
  };
  std::vector<Node> nodes;

  static DiskState read(const std::string& directory);
  // Replaces the content of a directory by this state.
  void write(const std::string& directory) const;
  // Returns a hash of the names and bytes that are reachable from node 0.
  std::uint64_t hash() const;
};

struct DiskOperation {
  enum class Kind { kMake, kLink, kRemove, kMove, kExchange, kWrite, kLength, kSync };
  Kind kind{};
  int node = 0;               // created, given another name, removed, moved, written or synced
  bool is_directory = false;  // whether the node is a directory
  int directory = 0, to = 0;  // directory of its name; directory to which it is moved, or exchanged with `other`
  int other = -1;
  std::string name, to_name;
  std::uint64_t offset = 0;  // or length
  std::string bytes;

  std::string text() const;
};

// Returns the system calls in use, except that renaming with flags fails, as on NFS.
Syscalls without_rename_flags();

// Records the operations below a directory during its lifetime, without syncing. Only one may exist at a time.
// Thread-safe.
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

// The effect on the disk of a call that was not synced.
enum class Fate { kDone, kLost, kTorn };

// Returns the operations before `end` that are not synced before it. If `lies` is set, the disk ignores syncs.
std::vector<int> open_operations(const std::vector<DiskOperation>& all, int end, bool lies = false);
// Returns the disk's state after the first `end` operations. `fates` gives the fate of each operation in `open`; the
// others are done. `random` chooses how writes are torn.
DiskState state_after(const DiskState& before, const std::vector<DiskOperation>& all, int end,
                      const std::vector<int>& open, const std::vector<Fate>& fates, std::mt19937& random);

}  // namespace reshard
