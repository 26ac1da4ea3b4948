// SPDX-License-Identifier: Apache-2.0
// Access to the HDF5 library: its lock, handles that close themselves, errors as values.
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

// The library's hid_t, so that its header need not be included here.
using Id = std::int64_t;

// The lock that must be held for every call of the library, as some builds are not thread-safe. While it is held, the
// library prints no errors and loads no plugins, even if a file asks for them. A thread may lock it several times. A
// child process forked while it is held still holds it.
class LibraryLock {
 public:
  LibraryLock();
  ~LibraryLock();
  LibraryLock(const LibraryLock&) = delete;
  LibraryLock& operator=(const LibraryLock&) = delete;
};

// Returns whether an allocation failed while this thread held the lock. After one, the library may report any error,
// crash, or continue with a corrupted heap.
bool is_out_of_memory();

// An owned library object of any kind.
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

// Returns the handle, or if `id` is negative an error: out of memory, or `code` with "what: libhdf5 says '...'".
Result<Handle> checked(Id id, ErrorCode code, std::string_view what);
// Does the same for the result of a call that returns a negative number on failure.
Status checked_call(int result, ErrorCode code, std::string_view what);

// Makes datasets and the groups above them without timestamps, so that the same input gives the same file.
class DatasetMaker {
 public:
  // Returns the properties with which to create a file.
  static Result<Handle> file_properties();
  // Returns the properties with which to create a dataset.
  static Result<Handle> properties();
  // Makes a dataset of this shape at `path` (without a leading slash).
  Result<Handle> make(Id file, const std::string& path, Id type, const Dims& shape, Id properties);

 private:
  Status make_groups(Id file, const std::string& path);

  std::unordered_set<std::string> groups_;  // made so far
};

// "HDF5 1.10.8"
std::string library_version();

// Returns whether `place` is a regular file that begins like an HDF5 file.
bool is_hdf5_file(const PathSnapshot& place);

// Write and read an attribute with a text. A missing attribute reads as an empty text. Reading fails with kCorrupt if
// the attribute is not a text, or is longer than `limit`.
Status write_text_attribute(Id object, const char* name, std::string_view text);
Result<std::string> read_text_attribute(Id object, const char* name, std::size_t limit, const std::string& place);
// Returns whether an attribute is this text, which may be of variable length, as h5py writes it.
Result<bool> has_text_attribute(Id object, const char* name, std::string_view text, const std::string& place);

}  // namespace reshard::hdf5
