// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/ocdbt.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "formats/encoding/zstd_frame.h"
#include "lib/base/memory_limit.h"
#include "lib/base/text.h"
#include "lib/device/crc32.h"

namespace reshard::orbax {
namespace {

constexpr std::size_t kCrcBytes = 4;
constexpr Index kMaxManifestBytes = Index{256} << 20;
constexpr std::size_t kMaxPathBytes = std::size_t{64} << 20;  // of all files of one table
constexpr Index kUuidBytes = 16;

// ---- Numbers and columns

Result<std::uint64_t> read_varint(Cursor& in, std::string_view what) {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 70; shift += 7) {
    const auto byte = TRY(in.read<std::uint8_t>(what));
    if (shift == 63 && byte > 1) break;
    value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  return in.error(what, "expected a number below 2^64");
}

Result<Index> read_index(Cursor& in, std::string_view what) {
  const auto value = to_index(TRY(read_varint(in, what)));
  if (!value) return in.error(what, "expected a number below 2^63");
  return *value;
}

// Reads the numbers of one field of a table in order.
class Column {
 public:
  // Skips the `count` numbers in `in`.
  static Result<Column> take(Cursor& in, Index count, const char* what) {
    const Column out(in, what);
    for (Index i = 0; i < count; ++i) TRY(read_varint(in, what));
    return out;
  }
  Result<Index> next() { return read_index(in_, what_); }
  Result<std::uint64_t> next_uint64() { return read_varint(in_, what_); }
  // Returns the next number. Fails if it is not below `end`.
  Result<std::uint32_t> next_below(std::size_t end) {
    const Index value = TRY(next());
    if (static_cast<std::size_t>(value) >= end)
      return in_.error(what_, "expected less than " + std::to_string(end) + ", got " + std::to_string(value));
    return static_cast<std::uint32_t>(value);
  }

 private:
  Column(const Cursor& in, const char* what) : in_(in), what_(what) {}
  Cursor in_;
  const char* what_;
};

// Reads the strings of a table. Each shares a prefix with the previous one.
class SharedStrings {
 public:
  // Skips the lengths of `count` strings in `in`.
  static Result<SharedStrings> take(Cursor& in, Index count, const char* what) {
    const Column prefixes = TRY(Column::take(in, std::max<Index>(count, 1) - 1, what));
    const Column suffixes = TRY(Column::take(in, count, what));
    return SharedStrings(prefixes, suffixes, in, count, what);
  }
  // Skips the suffixes, which follow the lengths.
  Status take_suffixes(Cursor& in) {
    Column lengths = suffixes_;
    texts_ = in;
    for (Index i = 0; i < count_; ++i) TRY(in.skip(TRY(lengths.next()), what_));
    return {};
  }
  // Returns the next string, which is valid until the next call.
  Result<std::string_view> next() {
    const Index shared = is_first_ ? 0 : TRY(prefixes_.next());
    is_first_ = false;
    if (shared > std::ssize(now_)) return texts_.error(what_, "shares more than its predecessor has");
    const Bytes suffix = TRY(texts_.take(TRY(suffixes_.next()), what_));
    now_.resize(shared);
    if (now_.size() + suffix.size() > kMaxKeyBytes)
      return texts_.error(what_, "expected at most " + bytes_of(kMaxKeyBytes));
    now_ += as_string(suffix);
    return std::string_view(now_);
  }

 private:
  SharedStrings(const Column& prefixes, const Column& suffixes, const Cursor& in, Index count, const char* what)
      : prefixes_(prefixes), suffixes_(suffixes), texts_(in), count_(count), what_(what) {}
  Column prefixes_, suffixes_;
  Cursor texts_;
  Index count_;
  const char* what_;
  bool is_first_ = true;
  std::string now_;
};

// Reads the table of data files, with paths below the database's directory. The empty path, which only a manifest may
// have, is that of an empty tree: the first version of a database that was opened before anything was written.
Result<std::vector<DataFile>> read_files(Cursor& in, const std::string& base, bool of_manifest) {
  constexpr const char* kWhat = "data file";
  const Index count = TRY(read_index(in, "number of data files"));
  SharedStrings paths = TRY(SharedStrings::take(in, count, kWhat));
  Column bases = TRY(Column::take(in, count, kWhat));
  TRY(paths.take_suffixes(in));
  std::vector<DataFile> out;
  std::size_t bytes = 0;
  for (Index i = 0; i < count; ++i) {
    const std::string_view path = TRY(paths.next());
    const Index base_length = TRY(bases.next());
    if (base_length > std::ssize(path)) return in.error(kWhat, "its base is longer than its path");
    DataFile file{base + std::string(path), base + std::string(path.substr(0, base_length))};
    const bool is_nowhere = of_manifest && path.empty();
    if (file.path.size() > kMaxKeyBytes || (!is_nowhere && !is_safe_relative_path(file.path)))
      return in.error(kWhat, "'" + printable(path.substr(0, 200)) + "' is no path below the checkpoint's directory");
    bytes += sizeof(DataFile) + file.path.size() + file.base.size();
    if (bytes > kMaxPathBytes) return in.error(kWhat, "paths of more than " + human_bytes(kMaxPathBytes));
    out.push_back(std::move(file));
  }
  return out;
}

// ---- The envelope

// Returns the body of an object, which is a node or a manifest.
Result<std::string> unwrap(Bytes bytes, std::uint32_t magic, const std::string& path, Index offset, const char* what) {
  Cursor in(bytes, path, offset);
  const auto stored = __builtin_bswap32(TRY(in.read<std::uint32_t>(what)));
  if (stored != magic) return in.error(what, "expected its magic number, got other bytes");
  const auto length = TRY(in.read<std::uint64_t>(what));
  if (length != bytes.size() || bytes.size() < kEnvelopeBytes)
    return in.error(what, "expected " + bytes_of(bytes.size()) + ", it says " + bytes_of(length));
  const Bytes covered = bytes.first(bytes.size() - kCrcBytes);
  Cursor end(bytes.last(kCrcBytes), path, offset + std::ssize(covered));
  const auto recorded = TRY(end.read<std::uint32_t>("CRC-32C"));
  if (const std::uint32_t crc = crc32c(0, covered); crc != recorded)
    return corrupt(at(path, offset) + ": " + what + ": CRC-32C: expected " + std::to_string(recorded) + ", got " +
                   std::to_string(crc) + ": the bytes changed after they were saved");
  const auto version = TRY(read_varint(in, "format version")), method = TRY(read_varint(in, "compression"));
  if (version != 0 || method > 1)
    return unsupported(at(path, offset) + ": " + what + " of version " + std::to_string(version) + " and compression " +
                       std::to_string(method) + "; version 0 and compression 0 (none) and 1 (zstd) are read");
  const Bytes body = covered.subspan(in.position());
  if (method == 1) return zstd::decode(body, kMaxNodeBytes, at(path, in.offset()));
  if (std::ssize(body) > kMaxNodeBytes) return in.error(what, "more than " + human_bytes(kMaxNodeBytes));
  TRY(may_take(std::ssize(body), [&] { return at(path, offset) + ": " + what; }));
  return std::string(as_string(body));
}

Status at_end(const Cursor& in, const char* what) {
  if (in.done()) return {};
  return in.error(what, "expected its end, got " + bytes_of(in.left()));
}

// ---- The manifest

// Returns whether the manifest is numbered.
Result<bool> read_config(Cursor& in) {
  TRY(in.skip(kUuidBytes, "uuid"));
  const auto kind = TRY(read_varint(in, "kind of manifest"));
  if (kind > 1) return in.error("kind of manifest", "expected 0 or 1, got " + std::to_string(kind));
  TRY(read_varint(in, "max_inline_value_bytes"));
  TRY(read_varint(in, "max_decoded_node_bytes"));
  TRY(in.read<std::uint8_t>("version_tree_arity_log2"));
  if (TRY(read_varint(in, "compression")) == 1) TRY(in.read<std::uint32_t>("compression level"));
  return kind == 1;
}

// The columns of the versions in a manifest.
struct Versions {
  Column generations;
  Bytes heights;
  Column files, offsets, lengths, keys;
};

Result<std::optional<NodeReference>> last_version(Versions& columns, Index count, const std::vector<DataFile>& files,
                                                  const Cursor& in) {
  std::optional<NodeReference> root;
  Index generation = 0;
  for (Index i = 0; i < count; ++i) {
    const Index next = TRY(columns.generations.next());
    if (next <= generation) return in.error("version", "expected generations in ascending order");
    generation = next;
    const auto file = TRY(columns.files.next());
    const auto offset = TRY(columns.offsets.next_uint64()), length = TRY(columns.lengths.next_uint64());
    const Index keys = TRY(columns.keys.next());
    root = std::nullopt;
    if (offset == kNoRoot && length == kNoRoot) continue;
    const auto at = to_index(offset), size = to_index(length);
    if (!at || !size || file >= std::ssize(files) || files[file].path.empty())
      return in.error("version", "its root is nowhere");
    root = NodeReference{files[file], *at, *size, keys, static_cast<int>(columns.heights[i])};
  }
  return root;
}

Result<std::optional<NodeReference>> read_versions(Cursor& in, const std::vector<DataFile>& files) {
  const Index count = TRY(read_index(in, "number of versions"));
  const auto column = [&](const char* what) { return Column::take(in, count, what); };
  const Column generations = TRY(column("generation"));
  const Bytes heights = TRY(in.take(count, "height"));
  const Column file = TRY(column("file")), offsets = TRY(column("offset")), lengths = TRY(column("length"));
  const Column keys = TRY(column("number of keys"));
  for (const char* what : {"bytes of the tree", "bytes of values"}) TRY(column(what));
  TRY(in.skip(checked_mul(count, 8).value_or(INT64_MAX), "time"));
  Versions columns{generations, heights, file, offsets, lengths, keys};
  return last_version(columns, count, files, in);
}

// Skips older versions, which are not read. Fails if their table does not end with the manifest.
Status skip_older_versions(Cursor& in) {
  const Index count = TRY(read_index(in, "number of version nodes"));
  for (const char* what : {"generation", "file", "offset", "length", "number of generations"})
    TRY(Column::take(in, count, what));
  return in.skip(checked_mul(count, 9).value_or(INT64_MAX), "version node");  // a time and a height each
}

}  // namespace

Result<Manifest> parse_manifest(Bytes bytes, const std::string& path) {
  const std::string body = TRY(unwrap(bytes, kManifestMagic, path, 0, "manifest"));
  Cursor in(as_bytes(body), path);
  Manifest out;
  out.is_numbered = TRY(read_config(in));
  if (!out.is_numbered) {
    const std::vector<DataFile> files = TRY(read_files(in, "", true));
    out.root = TRY(read_versions(in, files));
    TRY(skip_older_versions(in));
  }
  TRY(at_end(in, "manifest"));
  return out;
}

// ---- Nodes

namespace {

Status read_children(Cursor& in, TreeNode& node) {
  const Index count = TRY(read_index(in, "number of children"));
  SharedStrings keys = TRY(SharedStrings::take(in, count, "key"));
  Column common = TRY(Column::take(in, count, "common prefix"));
  TRY(keys.take_suffixes(in));
  const auto column = [&](const char* what) { return Column::take(in, count, what); };
  Column files = TRY(column("file")), offsets = TRY(column("offset")), lengths = TRY(column("length"));
  Column numbers = TRY(column("number of keys"));
  for (const char* what : {"bytes of the tree", "bytes of values"}) TRY(column(what));
  TRY(may_take(checked_mul(count, sizeof(Child)).value_or(INT64_MAX),
               [&] { return in.error("node", count_of(count, "child node")).message(); }));
  node.children.reserve(count);
  std::string last;
  for (Index i = 0; i < count; ++i) {
    const std::string_view key = TRY(keys.next());
    const Index prefix = TRY(common.next());
    if (prefix > std::ssize(key)) return in.error("common prefix", "longer than the key");
    if (i > 0 && key <= last) return in.error("key", "expected keys in ascending order");
    last = key;
    const auto file = TRY(files.next_below(node.files.size()));
    const Index offset = TRY(offsets.next()), length = TRY(lengths.next()), number = TRY(numbers.next());
    node.children.push_back({std::string(key.substr(0, prefix)), file, offset, length, number});
  }
  return {};
}

Status read_values(Cursor& in, TreeNode& node, const OnLeafValue& value) {
  node.values = TRY(read_index(in, "number of values"));
  SharedStrings keys = TRY(SharedStrings::take(in, node.values, "key"));
  TRY(keys.take_suffixes(in));
  Column lengths = TRY(Column::take(in, node.values, "length")), kinds = TRY(Column::take(in, node.values, "kind"));
  Index indirect = 0;
  for (auto [i, each] = std::pair(Index{0}, kinds); i < node.values; ++i) indirect += TRY(each.next_below(2));
  Column files = TRY(Column::take(in, indirect, "file")), offsets = TRY(Column::take(in, indirect, "offset"));
  for (Index i = 0; i < node.values; ++i) {
    LeafValue now;
    now.key = TRY(keys.next());
    now.length = TRY(lengths.next());
    now.is_inline = TRY(kinds.next()) == 0;
    if (now.is_inline) {
      now.bytes = as_string(TRY(in.take(now.length, "value")));
    } else {
      now.file = TRY(files.next_below(node.files.size()));
      now.offset = TRY(offsets.next());
    }
    TRY(value(now, node.files));
  }
  return {};
}

}  // namespace

Result<TreeNode> parse_node(Bytes bytes, int height, const std::string& base, const std::string& path, Index offset,
                            const OnLeafValue& value) {
  const std::string body = TRY(unwrap(bytes, kNodeMagic, path, offset, "node"));
  const std::string place = at(path, offset) + ": node";
  Cursor in(as_bytes(body), place);
  const int stored = TRY(in.read<std::uint8_t>("height"));
  if (stored != height)
    return in.error("height", "expected " + std::to_string(height) + ", got " + std::to_string(stored));
  TreeNode out;
  out.files = TRY(read_files(in, base, false));
  TRY(height > 0 ? read_children(in, out) : read_values(in, out, value));
  TRY(at_end(in, "node"));
  return out;
}

// ---- The database

namespace {

class DatabaseReader {
 public:
  DatabaseReader(const PathSnapshot& directory, FilePool& files) : directory_(directory), pool_(files) {}

  Result<Database> run() {
    Manifest manifest = TRY(read_manifest(std::string(kManifest)));
    if (manifest.is_numbered) manifest = TRY(read_manifest(TRY(newest_manifest())));
    if (manifest.is_numbered) return corrupt(path_of(out_.metadata_files.back()) + ": expected a list of versions");
    if (manifest.root) TRY(visit(*manifest.root, ""));
    return std::move(out_);
  }

 private:
  std::string path_of(const std::string& name) const { return path_join(directory_.path(), name); }

  Result<Manifest> read_manifest(const std::string& name) {
    out_.metadata_files.push_back(name);
    const std::string path = path_of(name);
    const Index size = TRY(TRY(pool_.open(path))->size());
    TRY(may_take(std::min(size, kMaxManifestBytes), [&] { return path; }));
    return parse_manifest(as_bytes(TRY(read_whole_file(path, kMaxManifestBytes))), path);
  }

  // Returns the manifest with the greatest generation.
  Result<std::string> newest_manifest() {
    constexpr std::string_view kPrefix = "manifest.", kHex = "0123456789abcdef";
    std::string newest;
    for (const DirectoryEntry& entry : directory_.entries()) {
      const std::string_view number =
          entry.name.starts_with(kPrefix) ? std::string_view(entry.name).substr(kPrefix.size()) : std::string_view();
      if (number.size() == 16 && number.find_first_not_of(kHex) == std::string_view::npos) newest = entry.name;
    }
    if (newest.empty())
      return corrupt(path_of(std::string(kManifest)) +
                     ": expected manifest.<16 digits> next to it, which it "
                     "refers to; there is none");
    return newest;
  }

  std::uint32_t file_number(const std::string& path) {
    const auto [at, is_new] = numbers_.emplace(path, static_cast<std::uint32_t>(out_.values.files.size()));
    if (is_new) out_.values.files.push_back(path);
    return at->second;
  }

  Result<std::string> bytes_of_node(const NodeReference& node, const std::string& path) {
    constexpr Index kMaxStored = kMaxNodeBytes + (Index{1} << 20);
    const auto file = TRY(pool_.open(path));
    const Index size = TRY(file->size());
    if (!fits_inside(node.offset, node.length, size))
      return corrupt(at(path, node.offset) + ": node of " + bytes_of(node.length) + ": the file ends at byte " +
                     with_commas(size) + ": it is cut short or belongs to another save");
    if (node.length > kMaxStored)
      return unsupported(at(path, node.offset) + ": a node of " + human_bytes(node.length) + "; at most " +
                         human_bytes(kMaxStored) + " are read");
    TRY(may_take(node.length, [&] { return at(path, node.offset) + ": node"; }));
    std::string bytes(node.length, '\0');
    TRY(file->read_at(node.offset, {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}));
    return bytes;
  }

  // Adds the keys of a node and of the nodes below it. They all begin with `prefix`.
  Status visit(const NodeReference& node, const std::string& prefix) {
    const std::string path = path_of(node.file.path);
    // Writers refer to a node only once. A second reference could form a cycle, or describe 2^60 keys with few nodes.
    if (!visited_.emplace(node.file.path, node.offset).second)
      return corrupt(at(path, node.offset) + ": node: the tree refers to it twice");
    if (metadata_.insert(node.file.path).second) out_.metadata_files.push_back(node.file.path);
    TreeNode content;
    {
      const std::string bytes = TRY(bytes_of_node(node, path));
      content = TRY(parse_node(as_bytes(bytes), node.height, node.file.base, path, node.offset,
                               [&](const LeafValue& value, const std::vector<DataFile>& files) {
                                 return add(value, files, prefix).context(at(path, node.offset));
                               }));
    }
    Index keys = content.values;
    for (const Child& child : content.children) {
      if (prefix.size() + child.prefix.size() > kMaxKeyBytes)
        return corrupt(at(path, node.offset) + ": node: a prefix of more than " + bytes_of(kMaxKeyBytes));
      TRY(visit({content.files[child.file], child.offset, child.length, child.keys, node.height - 1},
                prefix + child.prefix));
      keys = checked_add(keys, child.keys).value_or(INT64_MAX);
    }
    if (keys == node.keys) return {};
    return corrupt(at(path, node.offset) + ": node: expected " + count_of(node.keys, "key") + ", got " +
                   with_commas(keys));
  }

  Status add(const LeafValue& value, const std::vector<DataFile>& files, const std::string& prefix) {
    key_.assign(prefix);
    key_ += value.key;
    if (key_.size() > kMaxKeyBytes) return corrupt("a key of more than " + bytes_of(kMaxKeyBytes));
    if (value.is_inline) return out_.values.add_inline(key_, value.bytes);
    return out_.values.add(key_, {file_number(files[value.file].path), value.offset, value.length});
  }

  const PathSnapshot& directory_;
  FilePool& pool_;
  Database out_;
  std::string key_;
  std::set<std::pair<std::string, Index>> visited_;  // nodes, by file and offset
  std::set<std::string> metadata_;
  std::unordered_map<std::string, std::uint32_t> numbers_;  // index of each file of values
};

}  // namespace

Result<Database> read_database(const PathSnapshot& directory, FilePool& files) {
  return DatabaseReader(directory, files).run();
}

}  // namespace reshard::orbax
