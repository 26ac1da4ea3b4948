// A target that consists of files of named tensors (formats/encoding/tensor_file_layout.h) and of small texts. What the
// files are called, and which tensor lies in which, is for the formats to say that are built on it.
#pragma once

#include <string>
#include <vector>

#include "formats/encoding/tensor_file_layout.h"
#include "lib/base/json.h"
#include "lib/checkpoint/format.h"

namespace reshard {

class TensorFilesTarget : public Target {
 public:
  bool wants_crcs() const override;
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;

  // Appends a file of these tensors, in this order; the catalog's tensors are left to the caller. Where each tensor's
  // bytes lie.
  Result<std::vector<Extent>> add_file(std::string name, Container container, std::vector<FileTensor> tensors);
  // Appends a file of whole tensors, and the tensors to the catalog.
  Status add_whole(std::string name, Container container, const std::vector<TargetTensor>& tensors);
  // Appends a file that is this text.
  void add_text(std::string name, std::string text);

  Catalog& catalog() { return catalog_; }
  using Target::catalog;

 private:
  struct TensorFile {
    std::uint32_t file = 0;
    TensorFileLayout layout;
  };
  struct TextFile {
    std::uint32_t file = 0;
    std::string text;
  };
  std::uint32_t append(std::string name, Index size);

  std::vector<TensorFile> tensor_files_;
  std::vector<TextFile> text_files_;
};

// The extensions of the two containers: ".safetensors", ".bin".
std::string_view container_extension(Container container);

// Whole tensors dealt out over files: as many in a row as fit `max_file_bytes`, a larger one in a file of its own. One
// file at least. `total` is set to the bytes of all. Unsupported for 2^63 bytes or more.
Result<std::vector<std::vector<TargetTensor>>> cut_by_size(const std::vector<TargetTensor>& tensors,
                                                           Index max_file_bytes, Index& total);

// The weight map of Hugging Face's index: {tensor: file} for the catalog's tensors, each in the file of its first
// fragment. In the catalog's order, or by name.
enum class IndexOrder { kAsStored, kByName };
Json weight_map(const Catalog& catalog, IndexOrder order);

// A Hugging Face model: `stem` and the container's extension for one file, "stem-00001-of-00004.ext" for several, with
// an index "stem.ext.index.json" as the last of the target's files. Unsupported for more than one rank.
Result<std::unique_ptr<Target>> lay_out_model(const LayoutRequest& request, std::string_view stem, Container container);

}  // namespace reshard
