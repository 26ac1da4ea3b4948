// What tests of DCP's `.metadata` share: how a catalog is shown, and pickles made by hand.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats/dcp/dcp.h"
#include "tests/support/checkpoints.h"
#include "tests/support/pickle_values.h"
#include "tests/support/temp_dir.h"

namespace reshard::metadata_cases {

using namespace pickled;

inline const std::string kMetadata = "torch.distributed.checkpoint.metadata";
inline const std::string kFilesystem = "torch.distributed.checkpoint.filesystem";

// Returns the catalog that a directory's metadata describes. The other files are not read.
inline Result<std::unique_ptr<Reader>> open(const std::string& path, bool validated = true) {
  return open_with(kDcpFormat, path, {.files_too = false, .validated = validated});
}

// Returns "[0:2, 0:3] in __0_0.distcp at 864, 1180 bytes".
inline std::string shown(const Catalog& catalog, const Fragment& f) {
  return to_string(f.box) + " in " + catalog.files[f.extent.file].path + " at " + std::to_string(f.extent.offset) +
         ", " + std::to_string(f.extent.length) + " bytes";
}
inline std::vector<std::string> shown(const Catalog& catalog, const FragmentList& fragments) {
  std::vector<std::string> out;
  for (std::size_t i = 0; i < fragments.size(); ++i) out.push_back(shown(catalog, fragments.get(i)));
  return out;
}

inline std::string shown(const KeyPath& path) {
  std::string out;
  for (const auto& part : path) {
    if (const auto* name = std::get_if<std::string>(&part))
      out += "/" + *name;
    else
      out += "[" + std::to_string(std::get<Index>(part)) + "]";
  }
  return out;
}

// Returns names, dtypes and shapes: "model.weight bfloat16 [2, 3]".
inline std::vector<std::string> tensors_of(const Catalog& catalog) {
  std::vector<std::string> out;
  for (const Tensor& t : catalog.tensors())
    out.push_back(t.name + " " + std::string(info(t.dtype).torch_name) + " " + to_string(t.shape));
  return out;
}
inline std::vector<std::string> blobs_of(const Catalog& catalog) {
  std::vector<std::string> out;
  for (const Blob& b : catalog.blobs)
    out.push_back(b.name + " in " + catalog.files[b.extent.file].path + " at " + std::to_string(b.extent.offset) +
                  ", " + std::to_string(b.extent.length) + " bytes");
  return out;
}
inline std::vector<std::string> files_of(const Catalog& catalog) {
  std::vector<std::string> out;
  for (const CatalogFile& f : catalog.files) out.push_back(f.path);
  return out;
}
inline std::string attribute(const Catalog& catalog, const std::string& name) {
  for (const auto& [key, value] : catalog.attributes)
    if (key == name) return value;
  return "";
}

inline Value size(const std::vector<Index>& dims) { return call(global("torch", "Size"), {integers(dims)}); }
inline Value layout(const std::string& name = "torch.strided") {
  return call(global("torch.serialization", "_get_layout"), {text(name)});
}
inline Value memory_format() { return call(global(kMetadata, "_MEM_FORMAT_ENCODING"), {integer(0)}); }
inline Value dtype(const std::string& name = "float32") { return global("torch", name); }
inline Value properties(Value type = dtype()) {
  return object(global(kMetadata, "TensorProperties"),
                tuple({std::move(type), layout(), boolean(false), memory_format(), boolean(false)}));
}
inline Value of_class(const std::string& name, const Fields& fields, const std::string& module = kMetadata) {
  return object(global(module, name), fields_of(fields));
}
inline Value chunk(const std::vector<Index>& offsets, const std::vector<Index>& sizes) {
  return of_class("ChunkStorageMetadata", {{"offsets", size(offsets)}, {"sizes", size(sizes)}});
}
inline Value tensor_entry(const std::vector<Index>& shape, Values chunks, Value type = properties()) {
  return of_class("TensorStorageMetadata",
                  {{"properties", std::move(type)}, {"size", size(shape)}, {"chunks", list(std::move(chunks))}});
}
inline Value bytes_entry() { return object(global(kMetadata, "BytesStorageMetadata")); }
inline Value item_of(const std::string& fqn, const std::vector<Index>& offset, Index index) {
  return of_class("MetadataIndex", {{"fqn", text(fqn)}, {"index", integer(index)}, {"offset", size(offset)}});
}
inline Value item_of(const std::string& fqn) {
  return of_class("MetadataIndex", {{"fqn", text(fqn)}, {"index", none()}});
}
inline Value place(const std::string& path, Index offset, Index length) {
  return of_class("_StorageInfo",
                  {{"relative_path", text(path)}, {"offset", integer(offset)}, {"length", integer(length)}},
                  kFilesystem);
}

// One float32 tensor w of [2, 3] in two rows, and one object. Each part can be replaced.
struct Parts {
  Value size = metadata_cases::size({2, 3});
  Value properties = metadata_cases::properties();
  Value chunks = list({chunk({0, 0}, {1, 3}), chunk({1, 0}, {1, 3})});
  Value tensor = nullptr;   // instead of the three above
  Value entries = nullptr;  // instead of all of state_dict_metadata
  Entries more_entries = {};
  Entries storage = {{item_of("w", {0, 0}, 0), place("__0_0.distcp", 0, 600)},
                     {item_of("w", {1, 0}, 1), place("__0_0.distcp", 600, 600)},
                     {item_of("step"), place("__0_0.distcp", 1200, 359)}};
  Value storage_data = nullptr;  // instead of `storage`
  Fields fields = {{"planner_data", dict({{text("w"), tuple({text("w")})}, {text("step"), tuple({text("step")})}})}};
  std::string module = kMetadata;

  std::string bytes() const {
    const Value w = tensor ? tensor
                           : of_class("TensorStorageMetadata",
                                      {{"properties", properties}, {"size", size}, {"chunks", chunks}}, module);
    Entries all = {{text("w"), w}, {text("step"), object(global(module, "BytesStorageMetadata"))}};
    all.insert(all.end(), more_entries.begin(), more_entries.end());
    Fields of_metadata = {{"state_dict_metadata", entries ? entries : dict(all)}};
    of_metadata.insert(of_metadata.end(), fields.begin(), fields.end());
    of_metadata.emplace_back("storage_data", storage_data ? storage_data : dict(storage));
    return bytes_of(of_class("Metadata", of_metadata, module));
  }
};

class DcpMetadataTest : public testing::Test {
 protected:
  void write(const std::string& bytes, const std::string& name = ".metadata") { dir_.write(name, bytes); }
  void write(const Parts& parts, const std::string& name = ".metadata") { write(parts.bytes(), name); }

  // Returns the catalog of the written metadata. Fails the test if it is refused.
  const Catalog& catalog(bool validated = true) {
    auto reader = open(dir_.path(), validated);
    if (reader) {
      reader_ = *std::move(reader);
      return reader_->catalog();
    }
    ADD_FAILURE() << reader.error().message();
    static const Catalog nothing;
    return nothing;
  }
  const Catalog& catalog_of(const Parts& parts, bool validated = true) {
    write(parts);
    return catalog(validated);
  }

  // Returns why the written metadata is refused, with D for the directory.
  std::string refusal() {
    const auto reader = open(dir_.path());
    if (reader) return "accepted";
    code_ = reader.error().code();
    return shortened(reader.error().message(), dir_.path());
  }
  std::string refusal_of(const Parts& parts) {
    write(parts);
    return refusal();
  }

  TempDir dir_;
  std::unique_ptr<Reader> reader_;
  ErrorCode code_ = ErrorCode::kInternal;
};

}  // namespace reshard::metadata_cases
