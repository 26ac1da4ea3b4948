// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "formats/encoding/torch_archive.h"
#include "formats/hdf5/hdf5.h"
#include "formats/hdf5/scan.h"
#include "lib/base/text.h"

namespace reshard::hdf5 {
namespace {

constexpr Index kMaxBlobBytes = Index{1} << 30;
constexpr std::size_t kShown = 5;  // most datasets that a warning lists

class Hdf5Reader : public Reader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

  Status locate(const std::vector<std::size_t>&, int, const std::string&) override { return {}; }
  Result<std::string> blob_bytes(const Blob& blob) override;
  Result<std::optional<std::string>> side_file(const std::string& name, Index limit) override;
  Result<std::optional<std::string>> side_file_start(const std::string& name, Index length) override;
  std::string describe(const Blob& blob) override;

 private:
  Result<std::string> bytes_of(const Extent& extent, Index limit, const std::string& what);

  std::vector<std::pair<std::string, Extent>> side_files_;
};

std::string not_tensors_text(const std::vector<std::pair<std::string, std::string>>& list) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < std::min(kShown, list.size()); ++i)
    parts.push_back("'" + printable(list[i].first) + "' (" + list[i].second + ")");
  std::string text = count_of(std::ssize(list), "dataset") + " cannot be read as tensors: " + join(parts, ", ");
  if (list.size() > kShown) text += " and " + with_commas(std::ssize(list) - Index{kShown}) + " more";
  return text;
}

Status Hdf5Reader::open(const PathSnapshot& place, const OpenOptions& options) {
  const std::string& path = place.path();
  TRY(scan_in_child(path, options.external_too));
  Listing listing = TRY(scan(path, options.external_too));
  catalog_ = std::move(listing.catalog);
  side_files_ = std::move(listing.side_files);
  if (!listing.not_tensors.empty()) {
    const std::string text = not_tensors_text(listing.not_tensors);
    if (catalog_.tensors().empty()) return unsupported(path + ": " + text);
    catalog_.warnings.push_back(text);
  }
  catalog_.sort_by_name();
  Index chunked = 0;
  for (const Tensor& tensor : catalog_.tensors()) chunked += tensor.fragments.has_encoded() ? 1 : 0;
  catalog_.attributes.emplace_back("format",
                                   "HDF5, " + count_of(std::ssize(catalog_.tensors()), "dataset") +
                                       (chunked > 0 ? ", " + with_commas(chunked) + " of them in encoded chunks" : ""));
  Status disjoint = check_extents_disjoint(catalog_, SharedExtents::kRefused);
  if (!disjoint) {
    disjoint = check_extents_disjoint(catalog_, SharedExtents::kTies);
    catalog_.shares_extents = disjoint.has_value();  // true if there are hard links
  }
  if (!options.validated) return {};
  TRY(validate(catalog_, options.files_too));
  return disjoint;
}

Result<std::string> Hdf5Reader::bytes_of(const Extent& extent, Index limit, const std::string& what) {
  if (extent.length > limit)
    return unsupported(what + " takes " + human_bytes(extent.length) + "; at most " + human_bytes(limit) + " are read");
  const auto file = TRY(files_.open(catalog_.file_path(extent.file)));
  if (!fits_inside(extent.offset, extent.length, TRY(file->size())))
    return corrupt(at(file->path(), extent.offset) + ": " + what + ": expected " + reshard::bytes_of(extent.length) +
                   ", the file ends before");
  std::string bytes(extent.length, '\0');
  TRY(file->read_at(extent.offset, {reinterpret_cast<std::byte*>(bytes.data()), bytes.size()}));
  return bytes;
}

Result<std::string> Hdf5Reader::blob_bytes(const Blob& blob) {
  const std::string what = "object '" + printable(blob.name) + "'";
  std::string bytes = TRY(bytes_of(blob.extent, kMaxBlobBytes, what));
  const auto file = TRY(files_.open(catalog_.file_path(blob.extent.file)));
  TRY(torch_archive::check_item(*file, blob.extent.offset, blob.extent.length).context(what));
  return bytes;
}

Result<std::optional<std::string>> Hdf5Reader::side_file(const std::string& name, Index limit) {
  for (const auto& [known, extent] : side_files_)
    if (known == name) return std::optional<std::string>(TRY(bytes_of(extent, limit, "'" + printable(name) + "'")));
  return std::optional<std::string>();
}

Result<std::optional<std::string>> Hdf5Reader::side_file_start(const std::string& name, Index length) {
  for (const auto& [known, extent] : side_files_) {
    if (known != name) continue;
    Extent start = extent;
    start.length = std::min(start.length, length);
    return std::optional<std::string>(TRY(bytes_of(start, length, "'" + printable(name) + "'")));
  }
  return std::optional<std::string>();
}

std::string Hdf5Reader::describe(const Blob& blob) {
  const auto file = files_.open(catalog_.file_path(blob.extent.file));
  if (!file) return "";
  const auto document = torch_archive::read_object_item(**file, blob.extent.offset, blob.extent.length);
  return document ? pickle::print(document->root(), 2, 4) : "";
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<Hdf5Reader>(place, options);
}

}  // namespace reshard::hdf5
