// SPDX-License-Identifier: Apache-2.0
#include <hdf5.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <optional>
#include <tuple>

#include "formats/hdf5/hdf5.h"
#include "formats/hdf5/library.h"
#include "formats/hdf5/memory_driver.h"
#include "formats/hdf5/names.h"
#include "formats/hdf5/types.h"
#include "lib/base/text.h"

namespace reshard::hdf5 {
namespace {

using Extents = std::array<hsize_t, kMaxRank>;

Extents extents_of(const Dims& dims) {
  Extents out{};
  std::transform(dims.begin(), dims.end(), out.begin(), [](Index n) { return static_cast<hsize_t>(n); });
  return out;
}

// A fragment's elements in its file: `count` runs of `block` elements that start `stride` elements apart.
struct Runs {
  hsize_t count = 1, stride = 1, block = 1;
};

// Returns the runs of a fragment, or nothing if they need more than one stride: a transposed fragment, or gaps of two
// sizes.
std::optional<Runs> runs_of(const Fragment& f) {
  Runs runs;
  bool has_gaps = false;
  Index reach = 1;  // length of a run so far
  for (int d = f.box.rank() - 1; d >= 0; --d) {
    const Index extent = f.box.shape[d], stride = f.strides[d];
    if (extent == 1) continue;
    if (!has_gaps && stride == reach) {
      runs.block *= static_cast<hsize_t>(extent);
    } else if (!has_gaps && stride > reach) {
      has_gaps = true;
      runs.count = static_cast<hsize_t>(extent);
      runs.stride = static_cast<hsize_t>(stride);
    } else if (has_gaps && stride == reach) {
      runs.count *= static_cast<hsize_t>(extent);
    } else {
      return std::nullopt;
    }
    reach = stride * extent;
  }
  runs.stride = std::max(runs.stride, runs.block);
  return runs;
}

class ViewWriter {
 public:
  explicit ViewWriter(const Catalog& catalog) : catalog_(catalog), known_files_(catalog.files.size()) {}
  Result<std::string> write(ViewReport& report);

 private:
  Status create_file();
  Status add(const Tensor& tensor, const std::string& path);
  Result<std::vector<Fragment>> fragments_of(const Tensor& tensor);
  Result<Handle> add_external(const std::string& path, Id type, const Dims& shape, const Extent& extent);
  Result<Handle> add_joined(const Tensor& tensor, const std::string& path, Id type,
                            const std::vector<Fragment>& fragments);
  const std::string& file_path(std::uint32_t file);
  // A strip: a helper dataset that shows a file as elements of one type.
  struct Strip {
    std::string path;
    Index begin = 0;  // byte in the file
    Index elements = 0;
  };
  Result<const Strip*> strip_of(std::uint32_t file, Index offset, DType dtype, bool big_endian);

  const Catalog& catalog_;
  std::vector<std::string> known_files_;  // absolute paths; empty until needed
  MemoryImage image_;
  Handle file_;
  DatasetMaker datasets_;
  std::map<std::tuple<std::uint32_t, DType, Index, bool>, Strip> strips_;  // by file, dtype, offset and byte order
  Index joined_ = 0;                                                       // number of joined fragments
};

// Returns the absolute path, because the library resolves relative ones against the reader's working directory.
const std::string& ViewWriter::file_path(std::uint32_t file) {
  std::string& known = known_files_[file];
  std::error_code ignored;
  if (known.empty()) known = std::filesystem::absolute(catalog_.file_path(file), ignored).lexically_normal().string();
  return known;
}

Status ViewWriter::create_file() {
  const Handle access = TRY(checked(memory_file_access(image_), ErrorCode::kInternal, "HDF5 view"));
  const Handle creation = TRY(DatasetMaker::file_properties());
  // Virtual datasets need library version 1.10.
  H5Pset_libver_bounds(access.get(), H5F_LIBVER_V18, H5F_LIBVER_V110);
  file_ =
      TRY(checked(H5Fcreate("memory", H5F_ACC_TRUNC, creation.get(), access.get()), ErrorCode::kInternal, "HDF5 view"));
  return write_text_attribute(file_.get(), "reshard_version", RESHARD_VERSION);
}

Result<std::vector<Fragment>> ViewWriter::fragments_of(const Tensor& tensor) {
  std::vector<Fragment> out;
  for (std::size_t i = 0; i < tensor.fragments.size(); ++i) {
    Fragment f = tensor.fragments.get(i);
    if (f.box.empty()) continue;
    if (f.encoding || !TRY(path_exists(file_path(f.extent.file)))) return unsupported("stored compressed");
    if (!runs_of(f)) return unsupported("stored transposed, or with gaps of several sizes");
    if (!out.empty() && f.big_endian != out.front().big_endian) return unsupported("stored in both byte orders");
    out.push_back(std::move(f));
  }
  return out;
}

Result<Handle> ViewWriter::add_external(const std::string& path, Id type, const Dims& shape, const Extent& extent) {
  const Handle creation = TRY(DatasetMaker::properties());
  TRY(checked_call(H5Pset_external(creation.get(), file_path(extent.file).c_str(), static_cast<off_t>(extent.offset),
                                   static_cast<hsize_t>(extent.length)),
                   ErrorCode::kUnsupported, path));
  return datasets_.make(file_.get(), path, type, shape, creation.get());
}

// Returns the strip of a whole file: one dimension of elements, starting at the first byte that is a whole number of
// elements before `offset`.
Result<const ViewWriter::Strip*> ViewWriter::strip_of(std::uint32_t file, Index offset, DType dtype, bool big_endian) {
  const Index element_bytes = byte_size(dtype);
  const auto key = std::tuple(file, dtype, offset % element_bytes, big_endian);
  if (const auto known = strips_.find(key); known != strips_.end()) return &known->second;
  Strip strip;
  strip.path = std::string(kOwnGroup) + "/pieces/" + std::to_string(strips_.size());
  strip.begin = offset % element_bytes;
  strip.elements = (catalog_.files[file].size - strip.begin) / element_bytes;
  const Handle type = TRY(type_of(dtype, big_endian));
  TRY(add_external(strip.path, type.get(), {strip.elements}, {file, strip.begin, strip.elements * element_bytes}));
  return &strips_.emplace(key, std::move(strip)).first->second;
}

Result<Handle> ViewWriter::add_joined(const Tensor& tensor, const std::string& path, Id type,
                                      const std::vector<Fragment>& fragments) {
  const Handle creation = TRY(DatasetMaker::properties());
  const Extents extents = extents_of(tensor.shape);
  const Handle whole =
      TRY(checked(H5Screate_simple(tensor.shape.rank(), extents.data(), nullptr), ErrorCode::kInternal, path));
  for (const Fragment& f : fragments) {
    const Index offset = f.extent.offset + f.start;
    const Strip& strip = *TRY(strip_of(f.extent.file, offset, tensor.dtype, f.big_endian));
    const Runs runs = *runs_of(f);
    const auto elements = static_cast<hsize_t>(strip.elements);
    const auto start = static_cast<hsize_t>((offset - strip.begin) / byte_size(tensor.dtype));
    const Extents origin = extents_of(f.box.origin), count = extents_of(f.box.shape);
    const Handle part = TRY(checked(H5Screate_simple(1, &elements, nullptr), ErrorCode::kInternal, path));
    const bool mapped =
        H5Sselect_hyperslab(part.get(), H5S_SELECT_SET, &start, &runs.stride, &runs.count, &runs.block) >= 0 &&
        H5Sselect_hyperslab(whole.get(), H5S_SELECT_SET, origin.data(), nullptr, count.data(), nullptr) >= 0 &&
        H5Pset_virtual(creation.get(), whole.get(), ".", ("/" + strip.path).c_str(), part.get()) >= 0;
    TRY(checked_call(mapped ? 0 : -1, ErrorCode::kInternal, path));
    ++joined_;
  }
  return datasets_.make(file_.get(), path, type, tensor.shape, creation.get());
}

Status ViewWriter::add(const Tensor& tensor, const std::string& path) {
  if (tensor.name.size() > kMaxTextAttribute)
    return unsupported("a name of " + count_of(std::ssize(tensor.name), "byte") + "; HDF5 has room for " +
                       with_commas(Index{kMaxTextAttribute}));
  const auto fragments = TRY(fragments_of(tensor));
  const Handle type = TRY(type_of(tensor.dtype, !fragments.empty() && fragments.front().big_endian).context([&] {
    return tensor_text(tensor.name);
  }));
  const bool in_one_run = fragments.size() == 1 && fragments[0].strides == row_major_strides(tensor.shape);
  Handle dataset;
  if (fragments.empty()) {
    dataset = TRY(datasets_.make(file_.get(), path, type.get(), tensor.shape, TRY(DatasetMaker::properties()).get()));
  } else if (in_one_run) {
    const Fragment& f = fragments[0];
    dataset =
        TRY(add_external(path, type.get(), tensor.shape, {f.extent.file, f.extent.offset + f.start, tensor.bytes()}));
  } else {
    dataset = TRY(add_joined(tensor, path, type.get(), fragments));
  }
  if (name_of_path(path) != tensor.name) TRY(write_text_attribute(dataset.get(), kNameAttribute, tensor.name));
  if (needs_attribute(tensor.dtype))
    TRY(write_text_attribute(dataset.get(), kDTypeAttribute, info(tensor.dtype).torch_name));
  return {};
}

Result<std::string> ViewWriter::write(ViewReport& report) {
  TRY(create_file());
  std::vector<std::string_view> names;
  for (const Tensor& tensor : catalog_.tensors()) names.push_back(tensor.name);
  PathMaker paths(names);
  std::string refused_text;
  for (const Tensor& tensor : catalog_.tensors()) {
    const Status added = add(tensor, paths.path_of(tensor.name));
    if (added) {
      ++report.tensors;
      continue;
    }
    if (added.error().code() != ErrorCode::kUnsupported) return Error(added.error());
    report.refused.emplace_back(tensor.name, added.error().message());
    refused_text += tensor.name + ": " + added.error().message() + "\n";
  }
  report.joined = joined_;
  if (!refused_text.empty())
    TRY(write_text_attribute(file_.get(), "reshard_not_shown", refused_text.substr(0, kMaxTextAttribute)));
  file_ = Handle();
  std::string text(image_.end, '\0');
  image_.read(0, {reinterpret_cast<std::byte*>(text.data()), text.size()});
  return text;
}

}  // namespace

Result<ViewReport> write_view(const Catalog& catalog, const std::string& path, bool replace) {
  const LibraryLock lock;
  ViewReport report;
  const std::string text = TRY(ViewWriter(catalog).write(report));
  if (report.tensors == 0 && !report.refused.empty())
    return unsupported(path + ": no tensor can be shown in place; '" +
                       printable(report.refused[0].first.substr(0, 100)) + "' is " + report.refused[0].second);
  TRY(replace_file(path, text, replace));
  return report;
}

}  // namespace reshard::hdf5
