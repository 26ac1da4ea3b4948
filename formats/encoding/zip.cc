// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/zip.h"

#include <algorithm>
#include <cassert>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <optional>
#include <unordered_set>
#include <utility>

#include "lib/base/cursor.h"
#include "lib/base/memory_limit.h"
#include "lib/base/storage/read_ahead.h"
#include "lib/base/storage/storage.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"
#include "lib/device/crc32.h"

namespace reshard::zip {

// The numbers of a central or local header, with those of its zip64 extra field applied.
struct Header {
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint32_t crc = 0;
  std::uint64_t stored_size = 0;
  std::uint64_t size = 0;
  std::uint64_t local_offset = 0;  // central only
  std::string_view name;
};

namespace {

constexpr std::uint32_t kLocalMagic = 0x04034b50;    // APPNOTE 4.3.7
constexpr std::uint32_t kCentralMagic = 0x02014b50;  // 4.3.12
constexpr std::uint32_t kEnd64Magic = 0x06064b50;    // 4.3.14
constexpr std::uint32_t kLocatorMagic = 0x07064b50;  // 4.3.15
constexpr std::uint32_t kEndMagic = 0x06054b50;      // 4.3.16
constexpr std::size_t kCrcInLocal = 14, kCrcInCentral = 16;
constexpr Index kLocalBytes = 30, kCentralBytes = 46, kEnd64Bytes = 56, kLocatorBytes = 20, kEndBytes = 22;
constexpr std::uint32_t kOnes32 = 0xFFFFFFFF;
constexpr std::uint16_t kOnes16 = 0xFFFF;
constexpr std::uint16_t kZip64Extra = 0x0001;
constexpr std::uint16_t kPaddingExtra = 0x4246;  // "FB", torch's padding

constexpr std::uint16_t kDescriptorFlag = 1 << 3;  // sizes and CRC follow the payload
constexpr std::uint16_t kUtf8Flag = 1 << 11;
// Flags for encryption, patches, strong encryption and masked headers, which are refused.
constexpr std::uint16_t kRefusedFlags = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 13;

constexpr Index kSmallArchive = 16 << 10;  // archives up to this size are read at once
constexpr Index kWindow = 4 << 10;         // bytes read at both ends of a larger archive

std::string hex(std::string_view bytes) {
  std::string out;
  char text[4];
  for (char c : bytes) {
    std::snprintf(text, sizeof text, "%02x ", static_cast<unsigned>(static_cast<unsigned char>(c)));
    out += text;
  }
  if (!out.empty()) out.pop_back();
  return out;
}

std::string expected(Index wanted, Index got) {
  return "expected " + std::to_string(wanted) + ", got " + std::to_string(got);
}

// Replaces numbers that are all ones by those of the zip64 extra field, which are in this order. A local header that
// was written before its sizes were known may have the field although its own numbers are zero; then it is ignored.
Status apply_zip64(Cursor extra, Header& h, bool is_central) {
  while (!extra.done()) {
    if (extra.left() < 4) return {};  // padding, not a field
    const auto id = TRY(extra.read<std::uint16_t>("extra field id"));
    const auto n = TRY(extra.read<std::uint16_t>("extra field length"));
    Cursor field = TRY(extra.sub(n, "extra field"));
    if (id != kZip64Extra) continue;
    if (h.size == kOnes32) h.size = TRY(field.read<std::uint64_t>("zip64 size"));
    if (h.stored_size == kOnes32) h.stored_size = TRY(field.read<std::uint64_t>("zip64 stored size"));
    if (is_central && h.local_offset == kOnes32) h.local_offset = TRY(field.read<std::uint64_t>("zip64 header offset"));
    return {};
  }
  return {};
}

// Reads the fields that the central and the local header of a member share. Returns the length of the name.
Result<std::uint16_t> read_common_fields(Cursor& c, Header& h) {
  h.flags = TRY(c.read<std::uint16_t>("flags"));
  h.method = TRY(c.read<std::uint16_t>("method"));
  TRY(c.skip(4, "time and date"));
  h.crc = TRY(c.read<std::uint32_t>("crc"));
  h.stored_size = TRY(c.read<std::uint32_t>("stored size"));
  h.size = TRY(c.read<std::uint32_t>("size"));
  return c.read<std::uint16_t>("name length");
}

Result<Header> read_central(Cursor& c) {
  [[maybe_unused]] const Index start = c.position();  // used by assertions only
  const auto magic = TRY(c.read<std::uint32_t>("central directory entry"));
  if (magic != kCentralMagic) return c.error("central directory entry", "expected the bytes PK 01 02");
  Header h;
  TRY(c.skip(4, "versions"));
  const std::uint16_t name_bytes = TRY(read_common_fields(c, h));
  const auto extra_bytes = TRY(c.read<std::uint16_t>("extra length"));
  const auto comment_bytes = TRY(c.read<std::uint16_t>("comment length"));
  const auto disk = TRY(c.read<std::uint16_t>("disk"));
  TRY(c.skip(6, "attributes"));
  h.local_offset = TRY(c.read<std::uint32_t>("header offset"));
  assert(c.position() - start == kCentralBytes);
  h.name = as_string(TRY(c.take(name_bytes, "name")));
  TRY(apply_zip64(TRY(c.sub(extra_bytes, "extra fields")), h, true));
  TRY(c.skip(comment_bytes, "comment"));
  if (disk != 0 && disk != kOnes16)
    return c.error("central directory entry", "expected disk 0, got " + std::to_string(disk));
  return h;
}

}  // namespace

// The place of the central directory, relative to the archive's first byte.
struct Archive::Directory {
  Index offset = 0;
  Index size = 0;
  Index count = 0;
};

Error Archive::error(Index offset, std::string_view what, std::string_view detail) const {
  return corrupt(at(file_->path(), base_ + offset) + ": " + std::string(what) + ": " + std::string(detail));
}

Status Archive::load_windows() {
  auto load = [&](Index offset, Index n) -> Status {
    Window w{offset, std::string(n, '\0')};
    TRY(file_->read_at(base_ + offset, std::as_writable_bytes(std::span(w.bytes.data(), w.bytes.size()))));
    windows_.push_back(std::move(w));
    return {};
  };
  if (length_ <= kSmallArchive) return load(0, length_);
  TRY(load(0, kWindow));
  return load(length_ - kWindow, kWindow);
}

// Returns n bytes at an offset from the archive's first byte. The caller must make sure that they are inside it.
Result<std::string_view> Archive::bytes_at(Index offset, Index n, std::string_view what, std::string& room) const {
  if (!fits_inside(offset, n, length_))
    return error(0, what,
                 "expected it inside the archive's " + bytes_of(length_) + ", got " + bytes_of(n) + " at " +
                     std::to_string(offset));
  for (const Window& w : windows_)
    if (offset >= w.offset && fits_inside(offset - w.offset, n, std::ssize(w.bytes)))
      return std::string_view(w.bytes).substr(offset - w.offset, n);
  room.resize(n);
  TRY(file_->read_at(base_ + offset, std::as_writable_bytes(std::span(room.data(), room.size()))).context(what));
  return std::string_view(room);
}

Result<Archive::Directory> Archive::find_directory() const {
  const Index end_at = length_ - kEndBytes;
  std::string room;
  const std::string_view end = TRY(bytes_at(end_at, kEndBytes, "zip end record", room));
  Cursor c(as_bytes(end), file_->path(), base_ + end_at);
  if (TRY(c.read<std::uint32_t>("zip end record")) != kEndMagic)
    return error(end_at, "zip end record",
                 "expected the bytes 50 4b 05 06, got " + hex(end.substr(0, 4)) +
                     ": the file is truncated, or still being written");
  const auto disk = TRY(c.read<std::uint16_t>("disk"));
  const auto directory_disk = TRY(c.read<std::uint16_t>("disk of the directory"));
  const auto count_here16 = TRY(c.read<std::uint16_t>("entries on this disk"));
  const auto count16 = TRY(c.read<std::uint16_t>("entries"));
  const auto size32 = TRY(c.read<std::uint32_t>("directory size"));
  const auto offset32 = TRY(c.read<std::uint32_t>("directory offset"));
  const auto comment = TRY(c.read<std::uint16_t>("comment length"));
  if ((disk != 0 && disk != kOnes16) || (directory_disk != 0 && directory_disk != kOnes16) || count_here16 != count16)
    return error(end_at, "zip end record", "expected an archive of one part");
  if (comment != 0) return error(end_at, "zip end record", "comment of " + bytes_of(comment) + ": expected none");

  std::uint64_t count = count16, size = size32, offset = offset32;
  Index directory_end = end_at;
  const Index locator_at = end_at - kLocatorBytes;
  if (locator_at >= 0) {
    const std::string_view locator = TRY(bytes_at(locator_at, kLocatorBytes, "zip64 locator", room));
    Cursor l(as_bytes(locator), file_->path(), base_ + locator_at);
    if (TRY(l.read<std::uint32_t>("zip64 locator")) == kLocatorMagic) {
      TRY(l.skip(4, "disk"));
      const auto end64_at = to_index(TRY(l.read<std::uint64_t>("zip64 end record offset")));
      if (!end64_at || *end64_at != locator_at - kEnd64Bytes)
        return error(locator_at, "zip64 locator",
                     "expected the zip64 end record right before it, at " + std::to_string(locator_at - kEnd64Bytes));
      const std::string_view end64 = TRY(bytes_at(*end64_at, kEnd64Bytes, "zip64 end record", room));
      Cursor e(as_bytes(end64), file_->path(), base_ + *end64_at);
      if (TRY(e.read<std::uint32_t>("zip64 end record")) != kEnd64Magic)
        return error(*end64_at, "zip64 end record", "expected the bytes 50 4b 06 06, got " + hex(end64.substr(0, 4)));
      TRY(e.skip(8 + 4 + 8, "size, versions, disks"));
      const auto count_here64 = TRY(e.read<std::uint64_t>("entries on this disk"));
      const auto count64 = TRY(e.read<std::uint64_t>("entries"));
      const auto size64 = TRY(e.read<std::uint64_t>("directory size"));
      const auto offset64 = TRY(e.read<std::uint64_t>("directory offset"));
      if (count_here64 != count64) return error(*end64_at, "zip64 end record", "expected an archive of one part");
      if ((count16 != kOnes16 && count16 != count64) || (size32 != kOnes32 && size32 != size64) ||
          (offset32 != kOnes32 && offset32 != offset64))
        return error(*end64_at, "zip64 end record",
                     "contradicts the end record: " + std::to_string(count64) + " entries in " + bytes_of(size64) +
                         " at " + std::to_string(offset64) + ", there " + std::to_string(count16) + " in " +
                         std::to_string(size32) + " at " + std::to_string(offset32));
      count = count64;
      size = size64;
      offset = offset64;
      directory_end = *end64_at;
    }
  }
  const auto d_offset = to_index(offset), d_size = to_index(size), d_count = to_index(count);
  if (!d_offset || !d_size || !fits_inside(*d_offset, *d_size, directory_end) || *d_offset + *d_size != directory_end)
    return error(end_at, "central directory",
                 "expected it to end at " + std::to_string(directory_end) + ", got " + bytes_of(size) + " at " +
                     std::to_string(offset));
  if (*d_size > kMaxDirectoryBytes)
    return unsupported(at(file_->path(), base_ + *d_offset) + ": central directory: expected at most " +
                       with_commas(kMaxDirectoryBytes) + " bytes, got " + with_commas(*d_size));
  if (!d_count || *d_count > *d_size / kCentralBytes)
    return error(*d_offset, "central directory",
                 "expected room for " + std::to_string(count) + " entries, got " + bytes_of(size));
  return Directory{*d_offset, *d_size, *d_count};
}

namespace {

Status check_supported(const Header& h, const std::string& path, Index offset) {
  const auto what = [&] { return at(path, offset) + ": member '" + printable(h.name) + "': "; };
  if (h.method != 0)
    return unsupported(what() + "is compressed (method " + std::to_string(h.method) +
                       "); only stored members can be read");
  if (h.flags & kRefusedFlags)
    return unsupported(what() + "is encrypted or patched (flags " + std::to_string(h.flags) + ")");
  return {};
}

// Requests the local headers of the next members of an archive in a file behind a URL. They are far apart, and each is
// checked before the next one is read.
void expect_local_headers(Cursor entries, Index count, const File& file, Index base, Index length, ReadAhead& ahead) {
  constexpr Index kHeader = Index{1} << 10;  // bytes; longer names and extra fields are read as needed
  std::vector<FileRange> ranges;
  for (; count > 0; --count) {
    const auto h = read_central(entries);
    const auto begin = h ? to_index(h->local_offset) : std::nullopt;
    if (!begin || *begin >= length) break;
    if (*begin + kHeader > kWindow && *begin < length - kWindow)
      ranges.push_back({file.path(), base + *begin, std::min(kHeader, length - *begin)});
  }
  fetch_as_in_others(ranges, ahead);
}

}  // namespace

// Compares a member's local header with the central one and returns the length of its extra fields. The header must end
// before `end`. `room` is a buffer for its bytes.
Result<Index> Archive::check_local(const Header& h, Index header_at, Index end, std::string& room) const {
  const auto member = [&] { return "member '" + printable(h.name) + "'"; };
  const Index fixed = kLocalBytes + std::ssize(h.name);
  std::string_view local = TRY(bytes_at(header_at, fixed, "local header", room));
  std::uint16_t extra_bytes;
  std::memcpy(&extra_bytes, local.data() + kLocalBytes - 2, sizeof extra_bytes);
  if (!fits_inside(header_at + fixed, extra_bytes, end))
    return error(header_at, member(), "extra fields of " + bytes_of(extra_bytes) + " reach too far");
  if (extra_bytes > 0) local = TRY(bytes_at(header_at, fixed + extra_bytes, "local extra fields", room));

  Cursor l(as_bytes(local), file_->path(), base_ + header_at);
  Header own;
  const auto magic = TRY(l.read<std::uint32_t>("local header"));
  if (magic != kLocalMagic)
    return error(header_at, member(), "local header: expected the bytes 50 4b 03 04, got " + hex(local.substr(0, 4)));
  TRY(l.skip(2, "version"));
  const std::uint16_t name_bytes = TRY(read_common_fields(l, own));
  TRY(l.skip(2, "extra length"));
  if (name_bytes != h.name.size())
    return error(header_at, member(), "local name length: " + expected(std::ssize(h.name), name_bytes));
  own.name = as_string(TRY(l.take(name_bytes, "local name")));
  TRY(apply_zip64(TRY(l.sub(extra_bytes, "local extra fields")), own, false));
  if (own.name != h.name) return error(header_at, member(), "local name: got '" + printable(own.name) + "'");
  TRY(check_supported(own, file_->path(), base_ + header_at));
  // With a descriptor the local numbers are usually zero; others must be right.
  const bool later = (own.flags & kDescriptorFlag) != 0;
  auto agrees = [later](std::uint64_t local_value, std::uint64_t value) {
    return local_value == value || (later && local_value == 0);
  };
  if (!agrees(own.size, h.size) || !agrees(own.stored_size, h.size))
    return error(header_at, member(),
                 "local size: expected " + std::to_string(h.size) + ", got " + std::to_string(own.size) +
                     " stored in " + std::to_string(own.stored_size));
  if (!agrees(own.crc, h.crc)) return error(header_at, member(), "local crc: " + expected(h.crc, own.crc));
  return Index{extra_bytes};
}

Status Archive::read_directory(const Directory& directory) {
  std::string room, local_room;
  const std::string_view bytes = TRY(bytes_at(directory.offset, directory.size, "central directory", room));
  Cursor c(as_bytes(bytes), file_->path(), base_ + directory.offset);
  struct Region {
    Index begin, end;
    std::size_t entry;
  };
  std::vector<Region> regions;
  std::unordered_set<std::string_view> names;
  constexpr Index kAhead = 256;  // members
  std::optional<ReadAhead> ahead;
  for (Index i = 0; i < directory.count; ++i) {
    if (i % kAhead == 0 && length_ > kSmallArchive && is_url(file_->path()))
      expect_local_headers(c, std::min(kAhead, directory.count - i), *file_, base_, length_, ahead.emplace());
    const Index entry_at = c.offset();  // offset in the file
    const Header h = TRY(read_central(c));
    TRY(check_supported(h, file_->path(), entry_at));
    const auto member = [&] { return "member '" + printable(h.name) + "'"; };
    const auto wrong = [&](std::string_view detail) {
      return corrupt(at(file_->path(), entry_at) + ": " + member() + ": " + std::string(detail));
    };
    if (!names.insert(h.name).second) return wrong("comes twice");
    const auto header_at = to_index(h.local_offset), size = to_index(h.size);
    if (h.size != h.stored_size || !header_at || !size)
      return wrong("expected a stored size of " + std::to_string(h.size) + ", got " + std::to_string(h.stored_size));
    const Index fixed = kLocalBytes + std::ssize(h.name);
    if (!fits_inside(*header_at, fixed, directory.offset))
      return wrong("expected a local header inside the first " + bytes_of(directory.offset) + ", got one at " +
                   std::to_string(h.local_offset));

    const Index extra_bytes = TRY(check_local(h, *header_at, directory.offset, local_room));
    const Index payload = *header_at + fixed + extra_bytes;
    if (!fits_inside(payload, *size, directory.offset))
      return error(*header_at, member(),
                   "expected " + bytes_of(*size) + " before the central directory, got " +
                       std::to_string(directory.offset - payload));
    regions.push_back({*header_at, payload + *size, entries_.size()});
    Entry entry{std::string(h.name), base_ + payload, *size, h.crc};
    if (h.crc == 0 && *size > 0) entry.crc = std::nullopt;
    entries_.push_back(std::move(entry));
  }
  if (!c.done()) return c.error("central directory", bytes_of(c.left()) + " after its last entry");

  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < regions.size(); ++i)
    if (regions[i].begin < regions[i - 1].end)
      return error(regions[i].begin, "member '" + printable(entries_[regions[i].entry].name) + "'",
                   "overlaps member '" + printable(entries_[regions[i - 1].entry].name) + "'");
  return {};
}

Result<Archive> Archive::open(const File& file, Index offset, Index length) {
  Archive archive(file, offset, length);
  if (offset < 0 || length < kEndBytes || !checked_add(offset, length))
    return archive.error(0, "zip archive",
                         "expected at least " + bytes_of(kEndBytes) + ", got " + std::to_string(length));
  TRY(archive.load_windows());
  std::string room;
  const std::string_view magic = TRY(archive.bytes_at(0, 4, "zip archive", room));
  if (magic != kMagic)
    return archive.error(
        0, "zip archive",
        "expected the bytes 50 4b 03 04, got " + hex(magic) + "; not an archive, or stale, or overwritten");
  const Directory directory = TRY(archive.find_directory());
  TRY(archive.read_directory(directory));
  return archive;
}

const Entry* Archive::find(std::string_view name) const {
  for (const Entry& e : entries_)
    if (e.name == name) return &e;
  return nullptr;
}

Result<std::string> Archive::read(const Entry& entry, Index limit) const {
  const std::string member = "member '" + printable(entry.name) + "'";
  if (entry.size > limit)
    return unsupported(at(file_->path(), entry.offset) + ": " + member + ": expected at most " +
                       count_of(limit, "byte") + ", got " + with_commas(entry.size));
  TRY(may_take(entry.size, [&] { return at(file_->path(), entry.offset) + ": " + member; }));
  std::string room;
  const std::string_view bytes = TRY(bytes_at(entry.offset - base_, entry.size, member, room));
  std::string out = bytes.data() == room.data() ? std::move(room) : std::string(bytes);
  const std::uint32_t crc = crc32(0, as_bytes(out));
  if (entry.crc && crc != *entry.crc) return error(entry.offset - base_, member, "crc: " + expected(*entry.crc, crc));
  return out;
}

namespace {

// Appends numbers one after the other.
template <class... T>
void put(std::string& out, T... v) {
  char bytes[(sizeof(T) + ...)];
  char* at = bytes;
  ((std::memcpy(at, &v, sizeof(T)), at += sizeof(T)), ...);
  out.append(bytes, sizeof bytes);
}

std::uint32_t clamp32(Index v) { return v >= kOnes32 ? kOnes32 : static_cast<std::uint32_t>(v); }
std::uint16_t version_needed(bool zip64) { return zip64 ? 45 : 20; }

}  // namespace

void Builder::local_header(const Member& m, Index alignment) {
  const bool zip64 = m.size >= kOnes32;
  std::string extra;
  if (zip64) {
    put(extra, kZip64Extra);
    put<std::uint16_t>(extra, 16);
    put(extra, m.size);
    put(extra, m.size);
  }
  if (alignment > 1) {
    const Index start = base_ + m.header + kLocalBytes + static_cast<Index>(m.name.size() + extra.size()) + 4;
    const Index padding = (alignment - start % alignment) % alignment;
    put(extra, kPaddingExtra);
    put(extra, static_cast<std::uint16_t>(padding));
    extra.append(static_cast<std::size_t>(padding), 'Z');
  }
  constexpr std::uint16_t kStored = 0;
  constexpr std::uint32_t kTimeAndDate = 0;
  local_crc_ = out_.size() + kCrcInLocal;
  put(out_, kLocalMagic, version_needed(zip64), kUtf8Flag, kStored, kTimeAndDate, m.crc, clamp32(m.size),
      clamp32(m.size), static_cast<std::uint16_t>(m.name.size()), static_cast<std::uint16_t>(extra.size()));
  out_ += m.name;
  out_ += extra;
}

void Builder::add(std::string_view name, std::string_view payload) {
  members_.push_back({std::string(name), position(), std::ssize(payload), crc32(0, as_bytes(payload))});
  local_header(members_.back(), 1);
  out_ += payload;
}

void Builder::add_hole(std::string_view name, Index size, std::uint32_t crc, Index alignment) {
  members_.push_back({std::string(name), position(), size, crc});
  local_header(members_.back(), alignment);
  holes_.push_back(out_.size());
  hole_bytes_ += size;
}

void Builder::directory() {
  const Index directory_at = position();
  for (const Member& m : members_) {
    const bool big = m.size >= kOnes32;
    const bool far = m.header >= kOnes32;
    std::string extra;
    if (big || far) {
      put(extra, kZip64Extra);
      put(extra, static_cast<std::uint16_t>((big ? 16 : 0) + (far ? 8 : 0)));
      if (big) put(extra, m.size);
      if (big) put(extra, m.size);
      if (far) put(extra, m.header);
    }
    constexpr std::uint16_t kStored = 0, kComment = 0, kDisk = 0, kInside = 0;
    constexpr std::uint32_t kTimeAndDate = 0, kAttributes = 0;
    directory_crc_ = out_.size() + kCrcInCentral;
    put(out_, kCentralMagic, version_needed(big || far), version_needed(big || far), kUtf8Flag, kStored, kTimeAndDate,
        m.crc, clamp32(m.size), clamp32(m.size), static_cast<std::uint16_t>(m.name.size()),
        static_cast<std::uint16_t>(extra.size()), kComment, kDisk, kInside, kAttributes, clamp32(m.header));
    out_ += m.name;
    out_ += extra;
  }
  const Index directory_size = position() - directory_at;
  const Index count = std::ssize(members_);
  if (directory_at >= kOnes32 || directory_size >= kOnes32 || count >= kOnes16) {
    const Index end64_at = position();
    put(out_, kEnd64Magic);
    put<std::uint64_t>(out_, kEnd64Bytes - 12);  // size of the rest of the record
    put(out_, version_needed(true));
    put(out_, version_needed(true));
    put<std::uint32_t>(out_, 0);  // disks
    put<std::uint32_t>(out_, 0);
    put(out_, count);
    put(out_, count);
    put(out_, directory_size);
    put(out_, directory_at);
    put(out_, kLocatorMagic);
    put<std::uint32_t>(out_, 0);
    put(out_, end64_at);
    put<std::uint32_t>(out_, 1);  // number of disks
  }
  put(out_, kEndMagic);
  put<std::uint32_t>(out_, 0);  // disks
  const std::uint16_t count16 = count >= kOnes16 ? kOnes16 : static_cast<std::uint16_t>(count);
  put(out_, count16);
  put(out_, count16);
  put(out_, clamp32(directory_size));
  put(out_, clamp32(directory_at));
  put<std::uint16_t>(out_, 0);  // comment
}

Builder::Around Builder::finish() && {
  directory();
  Around around;
  around.before = out_.substr(0, holes_.empty() ? out_.size() : holes_.front());
  for (std::size_t i = 0; i < holes_.size(); ++i) {
    const std::size_t end = i + 1 < holes_.size() ? holes_[i + 1] : out_.size();
    around.after.push_back(out_.substr(holes_[i], end - holes_[i]));
  }
  const auto begin_of_text = [&](std::size_t at) {
    const auto next = std::upper_bound(holes_.begin(), holes_.end(), at);
    return next == holes_.begin() ? 0 : *std::prev(next);
  };
  around.local_crc = local_crc_ - begin_of_text(local_crc_);
  around.directory_crc = directory_crc_ - begin_of_text(directory_crc_);
  return around;
}

}  // namespace reshard::zip
