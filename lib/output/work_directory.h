// SPDX-License-Identifier: Apache-2.0
// The directories in which an output is made, DST.partial and DST.publishing, and the leftovers of killed runs.
//
// An output is written in DST.partial. A finished directory is moved into DST.publishing, which contains the marker
// instead of it, and from there to the destination. So a published directory never contains a marker, whenever the run
// is killed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/output/journal.h"

namespace reshard {

// The file that identifies a work directory as reshard's, and the journal of rank 0. The journals of other ranks have
// their number appended.
inline constexpr std::string_view kMarker = ".reshard-partial";

// Return the directory in which an output is written, and the one from which it is published.
inline std::string work_directory(const std::string& destination) { return destination + ".partial"; }
inline std::string publishing_directory(const std::string& destination) { return destination + ".publishing"; }

// A lock on a directory against other processes, held during its lifetime.
class DirectoryLock {
 public:
  // Locks a directory. The result is not held if another process holds the lock. An I/O error if `path` is not a
  // directory or is a link.
  static Result<DirectoryLock> take(const std::string& path);
  bool is_held() const { return fd_ >= 0; }
  DirectoryLock(DirectoryLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  DirectoryLock& operator=(DirectoryLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~DirectoryLock();

 private:
  explicit DirectoryLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

// Creates and locks an empty work directory with a marker.
Result<DirectoryLock> make_work(const std::string& work);
// Locks the leftover of a killed run. A usage error if the directory is not reshard's or another process uses it.
Result<DirectoryLock> claim_work(const std::string& work);

// Returns the names of the other ranks' journals.
Result<std::vector<std::string>> journals_of_ranks(const std::string& work);

// What earlier runs have finished of an output, or why a run with these `facts` (journal.h) cannot resume from it.
struct Leftover {
  std::optional<JournalText> finished;
  std::string why_not;
};
Result<Leftover> read_leftover(const std::string& work, const Target& target, const std::string& facts);

// Removes the files that are written after all data, because the resumed run writes them again.
Status remove_what_is_not_data(const std::string& work, const Target& target);

// Replaces the journals of all ranks by one, before a run resumes. Returns its length in bytes.
Result<Index> join_journals(const std::string& work, const JournalText& text);

// Removes a work directory. The marker is removed last, once the removal of the rest is durable: if the run is killed
// or loses power meanwhile, the next run still recognises the leftover.
Status remove_work(const std::string& work);
// Removes the marker and the journals.
Status remove_markers(const std::string& work);

}  // namespace reshard
