// Zip archives as torch.save writes them: members stored, not compressed, so that a tensor's bytes can be read in
// place.
//
//   [local header, name, extra, payload, (data descriptor)]...    one a member
//   [central directory entry, name, extra]...                     one a member: sizes, CRC, where its local header is
//   [zip64 end record, 56][zip64 locator, 20]                     always by torch; by others when numbers need it
//   [end record, 22]                                              the last bytes
//
// Numbers that do not fit 32 bits are all ones where they should stand, and follow in an extra field 0x0001.
// Offsets are from the archive's first byte, and the archive may be a slice of a file: a .distcp is many one after the
// other. Written by: caffe2/serialize/inline_container.cc over third_party/miniz; described in PKWARE's APPNOTE.TXT.
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
  std::optional<std::uint32_t> crc;  // CRC-32 of the payload; nothing where the writer recorded none (0 for size > 0)
};

struct Header;

// The directory of an archive, and a way to its small members. Small archives are read with one call to the operating
// system, large ones with two: their first and last 4 KiB, which hold everything but the tensor. Refers to the file.
class Archive {
 public:
  // Reads the archive in [offset, offset + length) of the file. Refuses compressed and encrypted members (unsupported),
  // and as corrupt: local headers that contradict the directory, members that overlap each other or the directory,
  // names that come twice, anything that reaches outside the slice.
  static Result<Archive> open(const File& file, Index offset, Index length);

  const std::vector<Entry>& entries() const { return entries_; }
  const Entry* find(std::string_view name) const;  // null: no such member
  // The payload of a member of at most `limit` bytes. Its CRC is checked.
  Result<std::string> read(const Entry& entry, Index limit) const;

 private:
  // A stretch of the archive that was read once and is kept.
  struct Window {
    Index offset = 0;  // from the archive's first byte
    std::string bytes;
  };
  struct Directory;

  Archive(const File& file, Index offset, Index length) : file_(&file), base_(offset), length_(length) {}
  Error error(Index offset, std::string_view what, std::string_view detail) const;
  Status load_windows();
  // In a window, or read into `room`.
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

// Builds the bytes around the payloads of an archive. Payloads may be left out (holes), because they are large and
// written by someone else.
class Builder {
 public:
  // `base` is the archive's offset in its file, relative to which payloads are aligned.
  explicit Builder(Index base) : base_(base) {}

  void add(std::string_view name, std::string_view payload);
  // A member whose payload the caller writes, aligned to `alignment` bytes (a power of two, at most 4096) of the file.
  // The archive's size must stay below 2^63 bytes.
  void add_hole(std::string_view name, Index size, std::uint32_t crc, Index alignment);
  // Ends the archive with its directory. Its bytes are around.before, and for each hole in turn its payload and the
  // text of around.after.
  struct Around {
    std::string before;
    std::vector<std::string> after;
    // Where the CRC of the last member stands: in the text before its payload, and in the last one.
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
  std::vector<std::size_t> holes_;  // where in out_ they stand
  Index hole_bytes_ = 0;
  std::size_t local_crc_ = 0, directory_crc_ = 0;  // in out_, of the last member
  std::vector<Member> members_;
};

}  // namespace reshard::zip
