// SPDX-License-Identifier: Apache-2.0
// A target that consists of files of named tensors, in one of two containers, and of small text files. The formats
// built on it decide the names of the files and which tensor is stored in which.
//
//   [header][tensor 0][between][tensor 1] ... [trailer]      torch.save (formats/encoding/torch_archive.h)
//   [header][tensor 0][tensor 1] ...                         safetensors (formats/encoding/safetensors_header.h)
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/encoding/safetensors_header.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/json.h"
#include "lib/checkpoint/format.h"

namespace reshard {

// The files that loaders of Hugging Face models look for next to config.json (transformers and the model code that it
// loads, sentencepiece, sentence-transformers).
inline constexpr std::string_view kModelSideFiles[] = {"generation_config.json",
                                                       "tokenizer.json",
                                                       "tokenizer.model",
                                                       "tokenizer_config.json",
                                                       "special_tokens_map.json",
                                                       "added_tokens.json",
                                                       "vocab.json",
                                                       "vocab.txt",
                                                       "merges.txt",
                                                       "chat_template.jinja",
                                                       "chat_template.json",
                                                       "preprocessor_config.json",
                                                       "processor_config.json",
                                                       "video_preprocessor_config.json",
                                                       "spiece.model",
                                                       "sentencepiece.bpe.model",
                                                       "source.spm",
                                                       "target.spm",
                                                       "vocab.spm",
                                                       "tekken.json",
                                                       "normalizer.json",
                                                       "additional_chat_templates/*.jinja",
                                                       "*.tiktoken",
                                                       "*.py",
                                                       "modules.json",
                                                       "config_sentence_transformers.json",
                                                       "sentence_*_config.json",
                                                       "{0..99}_*/*",
                                                       "original_config.json"};

// A tensor in a file, stored whole and in row-major order.
struct FileTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  Extent extent;  // filled in by add_file()
};

// Returns the tensors of a file, the same ones on each call. A job with many ranks has millions of them, so they are
// not kept: the bytes around the tensors are computed from a new list each time they are needed.
using ListTensors = std::function<std::vector<FileTensor>()>;

// A target of such files.
class TensorFilesTarget : public Target {
 public:
  TensorFilesTarget() = default;
  // Gives every safetensors file that is added this metadata besides its format (LayoutRequest::header_metadata).
  explicit TensorFilesTarget(const SafetensorsMetadata& metadata);
  TensorFilesTarget(const TensorFilesTarget&) = delete;
  TensorFilesTarget& operator=(const TensorFilesTarget&) = delete;
  bool wants_crcs() const override;
  bool holds_header_metadata() const override;
  Status seal(const PayloadCrc& crc, const EmitBytes& emit) const override;
  Status seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const override;

  // Appends a file of these tensors and returns the extent of each. Keeps their order, except that a safetensors file
  // begins with the tensors that fill whole pages. The caller adds tensors to the catalog. Fails with kUnsupported for
  // a dtype or a name that the container cannot express, and for 2^63 bytes or more.
  Result<std::vector<Extent>> add_file(std::string name, Container container, const std::vector<FileTensor>& tensors);
  // Does the same without keeping the tensors: `list` returns them again when needed. `now` is what it returns.
  Result<std::vector<Extent>> add_file(std::string name, Container container, std::vector<FileTensor> now,
                                       ListTensors list);
  // Appends a torch.save file whose pickle is more than a dict of its tensors. Needs at least one tensor.
  Result<std::vector<Extent>> add_archive(std::string name, const std::vector<FileTensor>& tensors,
                                          torch_archive::Content content);
  // Appends a file of whole tensors and adds them to the catalog, moving their names. In the file their names are
  // without `prefix`, which all of them must have.
  Status add_whole(std::string name, Container container, std::span<TargetTensor> tensors,
                   std::string_view prefix = {});
  // Sets the bytes of a tensor of an added safetensors file that is not in the catalog.
  void add_constant(const Extent& place, std::string bytes);
  // Appends a text file.
  void add_text(std::string name, std::string text);

  Catalog& catalog() { return catalog_; }
  using Target::catalog;

 private:
  struct TextFile {
    std::uint32_t file = 0;
    std::string text;
    Index offset = 0;
  };
  struct TensorsFile {
    std::uint32_t file = 0;
    Container container = Container::kSafetensors;
    ListTensors list;
    std::optional<torch_archive::Content> content;  // of torch.save; nothing: a dict of them
    bool is_empty = false;                          // has no tensors
    std::shared_ptr<const SafetensorsMetadata> metadata = nullptr;
  };
  using EmitText = std::function<Status(Index offset, std::string_view text)>;
  // Fills in the extents of a file's tensors and returns the file's size. Unless `emit` is null, passes it the bytes
  // around the tensors.
  static Result<Index> lay_out(const TensorsFile& file, std::vector<FileTensor>& tensors, const PayloadCrc& crc,
                               const Extent* place, const EmitText& emit);
  static Result<Index> lay_out_safetensors(const TensorsFile& file, std::vector<FileTensor>& tensors,
                                           const EmitText& emit);
  static Result<Index> lay_out_archive(const TensorsFile& file, std::vector<FileTensor>& tensors, const PayloadCrc& crc,
                                       const Extent* place, const EmitText& emit);
  static Status seal_file(const TensorsFile& file, const PayloadCrc& crc, const Extent* place, const EmitBytes& emit);
  Result<std::vector<Extent>> append(std::string name, TensorsFile file, std::vector<FileTensor> tensors);
  std::uint32_t append(std::string name, Index size);

  std::shared_ptr<const SafetensorsMetadata> metadata_ =
      std::make_shared<const SafetensorsMetadata>(SafetensorsMetadata{{"format", "pt"}});  // of the files
  std::vector<TensorsFile> files_;
  std::vector<TextFile> texts_;  // and constants
};

// Returns the extension of a container: ".safetensors" or ".bin".
std::string_view container_extension(Container container);

// Distributes whole tensors over files, in order: each file gets as many as fit into `max_file_bytes`; a larger tensor
// gets a file of its own. Returns at least one file. Sets `total` to the bytes of all tensors. Fails with kUnsupported
// for 2^63 bytes or more.
Result<std::vector<std::span<TargetTensor>>> cut_by_size(std::span<TargetTensor> tensors, Index max_file_bytes,
                                                         Index& total);

// Returns the weight map of Hugging Face's index: {tensor: file} for the catalog's tensors, with the file of the first
// fragment, in the order of the catalog or sorted by name.
enum class IndexOrder { kAsStored, kByName };
Json weight_map(const Catalog& catalog, IndexOrder order);

// Lays out a Hugging Face model as huggingface_hub's save_torch_state_dict does
// (huggingface_hub/serialization/_torch.py):
//
//   stem.ext                                   one file; models of diffusers have a stem of their own
//   stem-00001-of-00004.ext, ...               several files, and last
//   stem.ext.index.json                        their index
//   adapter/adapter_model.ext                  an adapter (kAdapterPrefix), under PEFT's names
//
// Fails with kUnsupported for more than one rank.
Result<std::unique_ptr<Target>> lay_out_model(LayoutRequest request, std::string_view stem, Container container);

}  // namespace reshard
