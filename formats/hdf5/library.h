// What every use of the HDF5 library here shares: one lock, handles that close themselves, errors as values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "lib/base/result.h"
#include "lib/checkpoint/path_snapshot.h"
#include "lib/layout/box.h"

namespace reshard::hdf5 {

// The library's hid_t, whose header stays out of ours.
using Id = std::int64_t;

// Held around every call of the library: some builds of it know nothing of threads. The library then prints no errors
// and loads no plugins, whatever a file wishes for.
// A thread may hold it several times; a process forked while it is held goes on holding it.
class LibraryLock {
 public:
  LibraryLock();
  ~LibraryLock();
  LibraryLock(const LibraryLock&) = delete;
  LibraryLock& operator=(const LibraryLock&) = delete;
};

// Whether an allocation failed while this thread held the lock. The library has many ways to say so, to crash, and to
// go on with a heap that it has spoilt.
bool is_out_of_memory();

// Closes what it holds, of whatever kind.
class Handle {
 public:
  explicit Handle(Id id = -1) : id_(id) {}
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Handle();

  Id get() const { return id_; }
  bool ok() const { return id_ >= 0; }

 private:
  Id id_;
};

// The handle, or an error: that memory is out, or of this kind, "what: libhdf5 says '...'".
Result<Handle> checked(Id id, ErrorCode code, std::string_view what);
// The same for calls that return a negative number when they fail.
Status checked_call(int result, ErrorCode code, std::string_view what);

// Makes datasets and the groups above them, without the times of their making: the same input gives the same file.
class DatasetMaker {
 public:
  // Properties to create a file with.
  static Result<Handle> file_properties();
  // Properties to create a dataset with.
  static Result<Handle> properties();
  // A dataset of this shape at `path` (no leading slash).
  Result<Handle> make(Id file, const std::string& path, Id type, const Dims& shape, Id properties);

 private:
  Status make_groups(Id file, const std::string& path);

  std::unordered_set<std::string> groups_;  // made so far
};

// "HDF5 1.10.8"
std::string library_version();

// Whether a regular file begins as an HDF5 file does.
bool is_hdf5_file(const PathSnapshot& place);

// Attributes that hold a text. An absent one is empty; one that is no text, or longer than `limit`, is corrupt.
Status write_text_attribute(Id object, const char* name, std::string_view text);
Result<std::string> read_text_attribute(Id object, const char* name, std::size_t limit, const std::string& place);

}  // namespace reshard::hdf5
