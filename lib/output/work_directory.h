// The directories in which an output is made, DST.partial and DST.publishing, and what a killed run has left there.
//
// An output grows in DST.partial. A finished directory then moves into DST.publishing, which has the marker in its
// place, and from there to its name: what is published never holds a marker, whenever the run is killed.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/output/journal.h"

namespace reshard {

// The file by which a work directory is known as one of ours, and the journal of rank 0; those of other ranks have
// their number after it.
inline constexpr std::string_view kMarker = ".reshard-partial";

// Where the output of that name grows, and where a finished one is on its way to the name.
inline std::string work_directory(const std::string& destination) { return destination + ".partial"; }
inline std::string publishing_directory(const std::string& destination) { return destination + ".publishing"; }

// A directory that no other process can lock while this lives.
class DirectoryLock {
 public:
  // Locks a directory; the result is not held if another process holds the lock. An I/O error if `path` is not a
  // directory, or is a link to one.
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

// Makes an empty work directory that the next run will recognise, and locks it.
Result<DirectoryLock> make_work(const std::string& work);
// Locks what a killed run has left. A usage error where the directory is not one of ours, or another process uses it.
Result<DirectoryLock> claim_work(const std::string& work);

// Names of the other ranks' journals.
std::vector<std::string> journals_of_ranks(const std::string& work);

// What is finished for good of the target's files; otherwise why a run whose output depends on `facts` (journal.h)
// cannot go on with what is there.
struct Leftover {
  std::optional<JournalText> finished;
  std::string why_not;
};
Result<Leftover> read_leftover(const std::string& work, const Target& target, const std::string& facts);

// Removes what was written when everything was finished: it is written again.
Status remove_what_is_not_data(const std::string& work, const Target& target);

// Puts one journal in the place of those of all ranks of the run that is continued. Its length, bytes.
Result<Index> join_journals(const std::string& work, const JournalText& text);

// Removes a work directory. The marker goes last, when the rest is gone for good: a run that is killed meanwhile, or
// loses its power, leaves something that the next one knows.
Status remove_work(const std::string& work);
// Removes the marker and the journals.
Status remove_markers(const std::string& work);

}  // namespace reshard
