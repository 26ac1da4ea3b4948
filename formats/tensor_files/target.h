// A target that consists of files of named tensors, in either of the containers that model files come in, and of small
// texts. What the files are called, and which tensor lies in which, is for the formats to say that are built on it.
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

// What loaders of Hugging Face models look for beside config.json (transformers and the code of models of its own,
// sentencepiece, sentence-transformers).
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

// A tensor of a file: whole and row-major there.
struct FileTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  Extent extent;  // filled in by add_file()
};

// Tells the tensors of a file, the same ones each time. A job of many ranks has millions, and what surrounds them is
// made of them when it is wanted and no sooner.
using TellTensors = std::function<std::vector<FileTensor>()>;

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

  // Appends a file of these tensors, in this order, but that safetensors begin with those of whole pages; the catalog's
  // tensors are left to the caller. Where each tensor's bytes lie. Unsupported for an element type or a name that the
  // container cannot express, and for 2^63 bytes or more.
  Result<std::vector<Extent>> add_file(std::string name, Container container, const std::vector<FileTensor>& tensors);
  // The same of tensors that `tell` tells, which are not kept: `now` is what it tells.
  Result<std::vector<Extent>> add_file(std::string name, Container container, std::vector<FileTensor> now,
                                       TellTensors tell);
  // Appends a file of torch.save that is more than a dict of its tensors, one at least.
  Result<std::vector<Extent>> add_archive(std::string name, const std::vector<FileTensor>& tensors,
                                          torch_archive::Content content);
  // Appends a file of whole tensors, and the tensors, whose names it takes, to the catalog. In the file they are
  // without `prefix`, which all of their names begin with.
  Status add_whole(std::string name, Container container, std::span<TargetTensor> tensors,
                   std::string_view prefix = {});
  // What stands in the place of a tensor of an added safetensors file that is none of the catalog's.
  void add_constant(const Extent& place, std::string bytes);
  // Appends a file that is this text.
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
    TellTensors tell;
    std::optional<torch_archive::Content> content;  // of torch.save; nothing: a dict of them
    bool is_empty = false;                          // has no tensors
    std::shared_ptr<const SafetensorsMetadata> metadata = nullptr;
  };
  using EmitText = std::function<Status(Index offset, std::string_view text)>;
  // Fills in the extents of a file's tensors, and gives its size. `emit` (null: nothing) gets the bytes around them.
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

// The extensions of the two containers: ".safetensors", ".bin".
std::string_view container_extension(Container container);

// Whole tensors dealt out over files: as many in a row as fit `max_file_bytes`, a larger one in a file of its own. One
// file at least. `total` is set to the bytes of all. Unsupported for 2^63 bytes or more.
Result<std::vector<std::span<TargetTensor>>> cut_by_size(std::span<TargetTensor> tensors, Index max_file_bytes,
                                                         Index& total);

// The weight map of Hugging Face's index: {tensor: file} for the catalog's tensors, each in the file of its first
// fragment. In the catalog's order, or by name.
enum class IndexOrder { kAsStored, kByName };
Json weight_map(const Catalog& catalog, IndexOrder order);

// A Hugging Face model: `stem`, of a model of diffusers its own, and the container's extension for one file,
// "stem-00001-of-00004.ext" for several, with an index "stem.ext.index.json" as the last of the target's files. An
// adapter (kAdapterPrefix) is a file beside them, "adapter/adapter_model.ext" under PEFT's names. Unsupported for more
// than one rank.
Result<std::unique_ptr<Target>> lay_out_model(LayoutRequest request, std::string_view stem, Container container);

}  // namespace reshard
