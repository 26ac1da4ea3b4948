// SPDX-License-Identifier: Apache-2.0
// Zip archives as torch.save writes them. Members are stored uncompressed, so a tensor can be read in place.
//
//   [local header, name, extra, payload, (data descriptor)]...   for each member
//   [central directory entry, name, extra]...                    for each member: sizes, CRC, where its header is
//   [zip64 end record, 56] [zip64 locator, 20]                   always by torch; by others if numbers need it
//   [end record, 22]                                             the last bytes
//
// A number that does not fit 32 bits is stored as all ones, and its value is in an extra field 0x0001. Offsets count
// from the archive's first byte. The archive may be a slice of a file: a .distcp file is many archives one after the
// other. Written by: caffe2/serialize/inline_container.cc with third_party/miniz. Specified in PKWARE's APPNOTE.TXT.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/result.h"

namespace reshard::zip {

inline constexpr Index kMaxDirectoryBytes = Index{64} << 20;
inline constexpr std::string_view kMagic{"PK\x03\x04", 4};  // the first bytes of an archive with members

struct Entry {
  std::string name;
  Index offset = 0;                  // of the payload, in the file
  Index size = 0;                    // bytes
  std::optional<std::uint32_t> crc;  // CRC-32 of the payload; nothing if the writer recorded none (0 with size > 0)
};

struct Header;

// The directory of an archive, and its small members. A small archive is read with one system call, a large one with
// two: its first and last 4 KiB, which hold everything except the tensor. The File must outlive it.
class Archive {
 public:
  // Reads the archive in [offset, offset + length) of the file. Fails with kUnsupported for compressed and encrypted
  // members, and with kCorrupt for local headers that contradict the directory, members that overlap each other or the
  // directory, duplicate names, and anything that exceeds the slice.
  static Result<Archive> open(const File& file, Index offset, Index length);

  const std::vector<Entry>& entries() const { return entries_; }
  const Entry* find(std::string_view name) const;  // null if there is no such member
  // Returns the payload of a member of at most `limit` bytes, after checking its CRC.
  Result<std::string> read(const Entry& entry, Index limit) const;

 private:
  // A range of the archive that is kept in memory.
  struct Window {
    Index offset = 0;  // from the archive's first byte
    std::string bytes;
  };
  struct Directory;

  Archive(const File& file, Index offset, Index length) : file_(&file), base_(offset), length_(length) {}
  Error error(Index offset, std::string_view what, std::string_view detail) const;
  Status load_windows();
  // Returns bytes from a window, or reads them into `room`.
  Result<std::string_view> bytes_at(Index offset, Index n, std::string_view what, std::string& room) const;
  Result<Directory> find_directory() const;
  Status read_directory(const Directory& directory);
  Result<Index> check_local(const Header& h, Index header_at, Index end, std::string& room) const;

  const File* file_;
  Index base_;
  Index length_;
  std::vector<Window> windows_;
  std::vector<Entry> entries_;
};

// Builds the bytes around the payloads of an archive. Large payloads are holes, which the caller writes.
class Builder {
 public:
  // `base` is the archive's offset in its file, relative to which payloads are aligned.
  explicit Builder(Index base) : base_(base) {}

  void add(std::string_view name, std::string_view payload);
  // Adds a member whose payload the caller writes. It is aligned to `alignment` bytes (a power of two, at most 4096) in
  // the file. The archive must be smaller than 2^63 bytes.
  void add_hole(std::string_view name, Index size, std::uint32_t crc, Index alignment);
  // Ends the archive with its directory. The archive is around.before and then, for each hole, its payload and its text
  // in around.after.
  struct Around {
    std::string before;
    std::vector<std::string> after;
    // The offsets of the last member's CRC in the text before its payload and in the last text.
    std::size_t local_crc = 0, directory_crc = 0;
  };
  Around finish() &&;

 private:
  struct Member {
    std::string name;
    Index header = 0;  // from the archive's first byte
    Index size = 0;
    std::uint32_t crc = 0;
  };
  Index position() const { return static_cast<Index>(out_.size()) + hole_bytes_; }
  void local_header(const Member& member, Index alignment);
  void directory();

  Index base_;
  std::string out_;                 // everything but the holes
  std::vector<std::size_t> holes_;  // their positions in out_
  Index hole_bytes_ = 0;
  std::size_t local_crc_ = 0, directory_crc_ = 0;  // in out_, of the last member
  std::vector<Member> members_;
};

}  // namespace reshard::zip
