// SPDX-License-Identifier: Apache-2.0
#include "formats/orbax/item_values.h"

#include <algorithm>

#include "formats/orbax/ocdbt.h"
#include "formats/orbax/zarr.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"

namespace reshard::orbax {

namespace {

constexpr std::string_view kInlineName = "(values inside nodes)";

// Appends the files below a directory, by paths that begin with `prefix`.
Status add_files(const PathSnapshot& directory, const std::string& prefix, int depth,
                 std::vector<DirectoryEntry>& out) {
  constexpr int kMaxDepth = 32;
  if (depth > kMaxDepth)
    return corrupt(directory.path() + ": expected directories nested at most " + std::to_string(kMaxDepth) + " deep");
  for (const DirectoryEntry& entry : directory.entries()) {
    if (entry.is_directory) {
      TRY(add_files(*TRY(directory.inside(entry.name)), prefix + entry.name + "/", depth + 1, out));
    } else {
      out.push_back(entry);
      out.back().name = prefix + entry.name;
    }
  }
  // Web servers do not list names that begin with a dot.
  constexpr std::string_view kHidden = kZarr2.substr(1);
  const bool is_listed = std::any_of(directory.entries().begin(), directory.entries().end(),
                                     [&](const DirectoryEntry& entry) { return entry.name == kHidden; });
  if (is_listed || !is_url(directory.path())) return {};
  if (auto entry = TRY(entry_at(path_join(directory.path(), kHidden)))) {
    out.push_back(std::move(*entry));
    out.back().name = prefix + std::string(kHidden);
  }
  return {};
}

}  // namespace

std::string below(const std::string& directory, std::string_view name) {
  return directory.empty() ? std::string(name) : path_join(directory, name);
}

Result<std::vector<DirectoryEntry>> files_in(const PathSnapshot& directory) {
  std::vector<DirectoryEntry> out;
  TRY(add_files(directory, "", 0, out));
  std::sort(out.begin(), out.end(), [](const DirectoryEntry& a, const DirectoryEntry& b) { return a.name < b.name; });
  return out;
}

bool ItemValues::has_database() const { return place_.has_file(kManifest); }

Status ItemValues::read() {
  if (place_.has_file(kManifest)) {
    Database database = TRY(read_database(place_, files_));
    values_ = std::move(database.values);
    catalog_.has_other_bytes = true;
  } else {
    for (const DirectoryEntry& file : TRY(files_in(place_))) {
      TRY(values_.add(file.name, {static_cast<std::uint32_t>(values_.files.size()), 0, file.size}));
      values_.files.push_back(file.name);
    }
  }
  used_.assign(values_.size(), false);
  file_of_.assign(values_.files.size(), std::nullopt);
  return {};
}

std::uint32_t ItemValues::memory_file() {
  if (!memory_file_) {
    memory_file_ = static_cast<std::uint32_t>(catalog_.files.size());
    catalog_.files.push_back({below(directory_, kInlineName), 0});
  }
  return *memory_file_;
}

Result<Extent> ItemValues::extent(std::size_t value) {
  used_[value] = true;
  Extent out = values_.extent(value);
  if (out.file == KeyValues::kInline) {
    const auto begin = static_cast<std::size_t>(out.offset), length = static_cast<std::size_t>(out.length);
    out = {memory_file(), std::ssize(memory_), out.length};
    memory_ += std::string_view(values_.inline_bytes()).substr(begin, length);
    return out;
  }
  std::optional<std::uint32_t>& file = file_of_[out.file];
  if (!file) {
    file = static_cast<std::uint32_t>(catalog_.files.size());
    const std::string name = below(directory_, values_.files[out.file]);
    const auto entry = TRY(entry_at(path_join(catalog_.root, name)));
    catalog_.files.push_back({name, entry && !entry->is_directory ? entry->size : -1});
  }
  out.file = *file;
  return out;
}

Result<std::string> ItemValues::text(std::size_t value, const std::string& name) {
  const Extent& place = values_.extent(value);
  if (place.length > kMaxArrayJson)
    return unsupported(name + ": " + human_bytes(place.length) + "; at most " + human_bytes(kMaxArrayJson) +
                       " are read");
  used_[value] = true;
  if (place.file == KeyValues::kInline) return values_.inline_bytes().substr(place.offset, place.length);
  const auto file = TRY(files_.open(path_join(place_.path(), values_.files[place.file])));
  std::string out(place.length, '\0');
  TRY(file->read_at(place.offset, {reinterpret_cast<std::byte*>(out.data()), out.size()}).context(name));
  return out;
}

Extent ItemValues::add(Bytes bytes) {
  const Extent out{memory_file(), std::ssize(memory_), std::ssize(bytes)};
  memory_ += as_string(bytes);
  return out;
}

Status ItemValues::keep_memory() {
  if (!memory_file_) return {};
  File file = TRY(File::create_in_memory());
  TRY(file.write_at(0, as_bytes(memory_)));
  catalog_.files[*memory_file_].size = std::ssize(memory_);
  files_.pin(catalog_.file_path(*memory_file_), std::move(file));
  return {};
}

}  // namespace reshard::orbax
