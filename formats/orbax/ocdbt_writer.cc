// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/ocdbt_writer.h"

#include <algorithm>
#include <utility>

#include "formats/orbax/ocdbt.h"
#include "lib/base/text.h"
#include "lib/device/crc32.h"

namespace reshard::orbax {
namespace {

constexpr std::size_t kNodeBytes = std::size_t{1} << 20;                             // a node ends when it has so many
constexpr std::uint64_t kMaxInlineBytes = 1024, kMaxDecodedNodeBytes = 100'000'000;  // Orbax's configuration
constexpr char kArityLog2 = 4;

void put(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7f) | 0x80);
  out += static_cast<char>(value);
}

void put(std::string& out, Index value) { put(out, static_cast<std::uint64_t>(value)); }

template <class T>
void put_raw(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Puts the envelope around a body.
std::string wrap(std::uint32_t magic, std::string_view body) {
  std::string out;
  out.reserve(body.size() + kEnvelopeBytes);
  put_raw(out, __builtin_bswap32(magic));
  put_raw(out, static_cast<std::uint64_t>(body.size() + kEnvelopeBytes));
  out.append(2, '\0');  // the version, no compression
  out += body;
  put_raw(out, crc32c(0, as_bytes(out)));
  return out;
}

// The columns of a table of strings, in which each string shares a prefix with the previous one.
struct PrefixedStrings {
  std::string prefixes, suffix_lengths, suffixes;
  std::string last;
  bool is_first = true;

  void add(std::string_view text) {
    const auto end = std::mismatch(text.begin(), text.end(), last.begin(), last.end()).first;
    const std::size_t shared = end - text.begin();
    if (!std::exchange(is_first, false)) put(prefixes, std::uint64_t{shared});
    put(suffix_lengths, std::uint64_t{text.size() - shared});
    suffixes += text.substr(shared);
    last = text;
  }
};

std::string table_of_files(const std::vector<std::string_view>& paths) {
  PrefixedStrings shared;
  for (const std::string_view path : paths) shared.add(path);
  std::string out;
  put(out, std::uint64_t{paths.size()});
  out += shared.prefixes + shared.suffix_lengths;
  out.append(paths.size(), '\0');  // no bases
  return out + shared.suffixes;
}

std::string manifest_of(const WrittenNode* root, const std::string& nodes_file) {
  std::string body = "reshard_database";  // the uuid
  for (const std::uint64_t number : {std::uint64_t{0}, kMaxInlineBytes, kMaxDecodedNodeBytes}) put(body, number);
  body += kArityLog2;
  body += '\0';  // no compression
  body += table_of_files(root ? std::vector<std::string_view>{nodes_file} : std::vector<std::string_view>{});
  const WrittenNode none;
  const WrittenNode& node = root ? *root : none;
  for (const std::uint64_t number : {1, 1}) put(body, number);  // one version, of generation 1
  body += static_cast<char>(node.height);
  put(body, Index{0});
  put(body, root ? static_cast<std::uint64_t>(node.offset) : kNoRoot);
  put(body, root ? static_cast<std::uint64_t>(node.length) : kNoRoot);
  for (const Index number : {node.keys, node.tree_bytes, node.value_bytes}) put(body, number);
  put_raw(body, std::uint64_t{0});  // the time, so that the same input gives the same bytes
  put(body, Index{0});              // no older versions
  return wrap(kManifestMagic, body);
}

}  // namespace

DatabaseWriter::DatabaseWriter(std::span<const CatalogFile> files, std::string nodes_file, Emit emit)
    : files_(files), nodes_file_(std::move(nodes_file)), emit_(std::move(emit)) {}

Status DatabaseWriter::add_key(std::string_view key) {
  if (leaf_.bytes() >= kNodeBytes) TRY(end_leaf());
  if (key.size() > kMaxKeyBytes)
    return unsupported("key '" + printable(key.substr(0, 100)) + "...': " + bytes_of(key.size()) + "; at most " +
                       bytes_of(kMaxKeyBytes) + " can be stored");
  if (leaf_.keys > 0 && key <= leaf_.last_key) return internal_error("database: key '" + printable(key) + "' is late");
  const auto end = std::mismatch(key.begin(), key.end(), leaf_.last_key.begin(), leaf_.last_key.end()).first;
  const std::size_t shared = end - key.begin();
  if (leaf_.keys > 0)
    put(leaf_.prefixes, std::uint64_t{shared});
  else
    leaf_.first_key = key;
  put(leaf_.suffix_lengths, std::uint64_t{key.size() - shared});
  leaf_.suffixes += key.substr(shared);
  leaf_.last_key = key;
  ++leaf_.keys;
  return {};
}

Status DatabaseWriter::add(std::string_view key, const Extent& value) {
  TRY(add_key(key));
  const auto [number, is_new] = leaf_.numbers.emplace(value.file, leaf_.files.size());
  if (is_new) leaf_.files.push_back(value.file);
  put(leaf_.lengths, value.length);
  put(leaf_.kinds, std::uint64_t{1});
  put(leaf_.file_numbers, number->second);
  put(leaf_.offsets, value.offset);
  leaf_.value_bytes += value.length;
  return {};
}

Status DatabaseWriter::add_inline(std::string_view key, std::string_view value) {
  TRY(add_key(key));
  put(leaf_.lengths, std::uint64_t{value.size()});
  put(leaf_.kinds, std::uint64_t{0});
  leaf_.values += value;
  return {};
}

Status DatabaseWriter::write_node(std::string_view body, WrittenNode node, std::vector<WrittenNode>& level) {
  const std::string bytes = wrap(kNodeMagic, body);
  node.offset = size_;
  node.length = std::ssize(bytes);
  node.tree_bytes += node.length;
  size_ += node.length;
  level.push_back(std::move(node));
  return emit_(bytes);
}

Status DatabaseWriter::end_leaf() {
  const Leaf leaf = std::exchange(leaf_, {});
  std::vector<std::string_view> paths;
  for (const std::uint32_t file : leaf.files) paths.push_back(files_[file].path);
  std::string body(1, '\0');  // the height
  body += table_of_files(paths);
  put(body, leaf.keys);
  for (const std::string* column : {&leaf.prefixes, &leaf.suffix_lengths, &leaf.suffixes, &leaf.lengths, &leaf.kinds,
                                    &leaf.file_numbers, &leaf.offsets, &leaf.values})
    body += *column;
  return write_node(body, {leaf.first_key, 0, 0, leaf.keys, 0, leaf.value_bytes, 0}, leaves_);
}

// Writes the nodes above one level.
Result<std::vector<WrittenNode>> DatabaseWriter::write_parents(const std::vector<WrittenNode>& children) {
  std::vector<WrittenNode> out;
  for (std::size_t begin = 0, end = 0; begin < children.size(); begin = end) {
    PrefixedStrings keys;
    std::string offsets, lengths, counts, tree_bytes, value_bytes;
    WrittenNode node{children[begin].first_key, 0, 0, 0, 0, 0, children[begin].height + 1};
    for (; end < children.size() && (end < begin + 2 || keys.suffixes.size() < kNodeBytes); ++end) {
      const WrittenNode& child = children[end];
      keys.add(child.first_key);
      put(offsets, child.offset);
      put(lengths, child.length);
      put(counts, child.keys);
      put(tree_bytes, child.tree_bytes);
      put(value_bytes, child.value_bytes);
      node.keys += child.keys;
      node.tree_bytes += child.tree_bytes;
      node.value_bytes += child.value_bytes;
    }
    const std::string zeros(end - begin, '\0');
    std::string body(1, static_cast<char>(node.height));
    body += table_of_files({nodes_file_});
    put(body, std::uint64_t{zeros.size()});
    body += keys.prefixes + keys.suffix_lengths + zeros + keys.suffixes;  // the keys of no child share a prefix
    body += zeros + offsets + lengths + counts + tree_bytes + value_bytes;
    TRY(write_node(body, std::move(node), out));
  }
  return out;
}

Result<std::string> DatabaseWriter::finish() {
  if (leaf_.keys > 0) TRY(end_leaf());
  std::vector<WrittenNode> level = std::move(leaves_);
  while (level.size() > 1) level = TRY(write_parents(level));
  return manifest_of(level.empty() ? nullptr : &level.front(), nodes_file_);
}

}  // namespace reshard::orbax
