// Fuzzes DCP metadata: accepted metadata has claims that can be checked, is equal after writing and reading it, and the
// row parser gives the same or declines.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "formats/dcp/metadata.h"
#include "lib/base/text.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"
#include "tests/support/dcp_metadata.h"

namespace reshard::dcp_metadata_fuzz {
namespace {

bool is_tensor_box(const Box& box, const Dims& shape) {
  return box.origin.rank() == shape.rank() && box.shape.rank() == shape.rank() && contains(whole(shape), box);
}

Status read(std::string bytes, Catalog& catalog) {
  const pickle::Document document = TRY(pickle::parse(std::move(bytes), "input"));
  dcp::MetadataReader reader(catalog);
  TRY(reader.add(document, "input"));
  return reader.finish();
}

// Returns whether the writer can have written a tensor: it stores no box twice, and an empty box only for an empty
// tensor.
bool can_be_written(const Tensor& t) {
  if (!t.replicas.empty()) return false;
  std::vector<Dims> origins;
  for (std::size_t i = 0; i < t.fragments.size(); ++i) {
    if (t.fragments.box(i).empty() && t.fragments.size() > 1) return false;
    origins.push_back(t.fragments.box(i).origin);
  }
  std::sort(origins.begin(), origins.end());
  return std::adjacent_find(origins.begin(), origins.end()) == origins.end();
}

KeyPath path_of(const KeyPath& path, const std::string& name) { return path.empty() ? KeyPath{name} : path; }

void write_again(const Catalog& catalog) {
  const auto& all = catalog.tensors();
  if (!std::all_of(all.begin(), all.end(), can_be_written)) return;
  std::vector<std::string> files;
  for (const CatalogFile& f : catalog.files) files.push_back(f.path);
  std::vector<TargetTensor> tensors;
  for (const Tensor& t : all) tensors.push_back({t.name, t.dtype, t.shape, {}, {}});
  std::vector<dcp::WrittenEntry> entries;
  for (std::size_t k = 0; k < all.size(); ++k) {
    dcp::WrittenEntry entry{&tensors[k], all[k].name, all[k].path, {}};
    for (std::size_t i = 0; i < all[k].fragments.size(); ++i) {
      const Extent& e = all[k].fragments.extent(i);
      entry.items.push_back({all[k].fragments.box(i), e.file, e.offset, e.length});
    }
    entries.push_back(std::move(entry));
  }
  for (const Blob& b : catalog.blobs)
    entries.push_back({nullptr, b.name, b.path, {{{}, b.extent.file, b.extent.offset, b.extent.length}}});

  Catalog again;
  require(read(dcp::write_metadata(entries, files), again).has_value());
  const auto same_place = [&](const Extent& a, const Extent& b) {
    return files[a.file] == again.files[b.file].path && a.offset == b.offset && a.length == b.length;
  };
  require(again.tensors().size() == all.size() && again.blobs.size() == catalog.blobs.size());
  for (std::size_t k = 0; k < all.size(); ++k) {
    const Tensor &a = all[k], &b = again.tensors()[k];
    require(a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && path_of(a.path, a.name) == b.path);
    require(b.replicas.empty() && a.fragments.has_boxes_of(b.fragments));
    for (std::size_t i = 0; i < a.fragments.size(); ++i)
      require(same_place(a.fragments.extent(i), b.fragments.extent(i)));
  }
  for (std::size_t i = 0; i < catalog.blobs.size(); ++i) {
    const Blob &a = catalog.blobs[i], &b = again.blobs[i];
    require(a.name == b.name && path_of(a.path, a.name) == b.path && same_place(a.extent, b.extent));
  }
}

}  // namespace

FUZZ_TARGET(dcp_metadata)(const std::uint8_t* data, std::size_t size) {
  Catalog catalog;
  const Status done = read(std::string(reinterpret_cast<const char*>(data), size), catalog);
  const auto by_rows = dcp::read_by_rows(input_file(data, size));
  if (by_rows) require(done && dcp::are_same(*by_rows, catalog));
  if (!done) {
    require(!done.error().message().empty());
    return 0;
  }
  for (const CatalogFile& f : catalog.files) require(is_safe_relative_path(f.path));
  const auto is_place = [&](const Extent& e) {
    return e.file < catalog.files.size() && e.offset >= 0 && e.length >= 0 &&
           checked_add(e.offset, e.length).has_value();
  };
  for (const Tensor& t : catalog.tensors()) {
    const auto elements = checked_volume(t.shape);
    require(elements && checked_mul(*elements, byte_size(t.dtype)).has_value());
    for (const FragmentList* list : {&t.fragments, &t.replicas})
      for (std::size_t i = 0; i < list->size(); ++i)
        require(is_tensor_box(list->box(i), t.shape) && is_place(list->extent(i)));
  }
  for (const Blob& b : catalog.blobs) require(is_place(b.extent));
  (void)validate(catalog, false);
  (void)bytes_needed(catalog);
  write_again(catalog);
  return 0;
}

}  // namespace reshard::dcp_metadata_fuzz
