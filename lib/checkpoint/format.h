// SPDX-License-Identifier: Apache-2.0
// A checkpoint format, as the rest of the program sees it: how to open one, how to lay one out, or both.
//
// Opening reads only metadata. Laying out is pure: it fixes every file, offset and length of the output before a byte
// is written, and later provides the bytes around the tensor data. lib/engine does the I/O in between.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/checkpoint/catalog.h"
#include "lib/checkpoint/path_snapshot.h"
#include "lib/layout/descriptor.h"

namespace reshard {

struct Family;

// An open checkpoint.
class Reader {
 public:
  virtual ~Reader() = default;

  Catalog& catalog() { return catalog_; }
  const Catalog& catalog() const { return catalog_; }
  FilePool& files() { return files_; }
  // Opens files through this pool from now on; for a reader that contains several others. Call it before locate().
  void use_files(const FilePool& files) { files_ = files; }

  // Finds the payloads of the listed tensors (indices into catalog().tensors()): reads the headers around them, checks
  // these against the metadata, and replaces item extents by payload extents and actual strides. Other tensors are
  // unchanged. `spool` is a directory with room for data that must be decoded before it can be read at random.
  virtual Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) = 0;

  // Returns the value of a blob as a torch.save archive without storages, the form in which all formats exchange blobs.
  virtual Result<std::string> blob_bytes(const Blob& blob) = 0;

  // Returns a file stored with the tensors (config.json, reshard_manifest.json) of at most `limit` bytes, or a
  // config.json derived by the format. Nothing if there is neither.
  virtual Result<std::optional<std::string>> side_file(const std::string& name, Index limit);

  // Returns the first `length` bytes of a stored side file, or all of it if it is shorter.
  virtual Result<std::optional<std::string>> side_file_start(const std::string& name, Index length);

  // Describes a blob's value in a few words: "1000", "[0.9, 0.95]", "a dict of 4". Empty if that is not possible.
  virtual std::string describe(const Blob& blob) = 0;

 protected:
  // Returns the directories to search for side files, in order.
  virtual std::vector<std::string> side_directories() const { return {catalog_.root}; }
  // Returns a config.json derived from the format's own description of the model, or nothing.
  virtual Result<std::optional<Json>> made_config() { return std::optional<Json>(); }

  Catalog catalog_;
  FilePool files_;
};

// A tensor to be written, and its placement.
struct TargetTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  KeyPath path;
  SharedPlacement placement;
  std::string plain_key = {};  // as in Tensor

  const std::string& key() const { return plain_key.empty() ? name : plain_key; }
};

// A value that is not a tensor, to be written.
struct TargetBlob {
  std::string name;
  KeyPath path;
  std::string bytes;  // from Reader::blob_bytes()
};

// The container for tensors, in formats that support both.
enum class Container { kSafetensors, kTorchSave };

// The number of attention heads of a model. A head is never cut.
struct HeadCounts {
  Index query = 0;
  Index key_value = 0;
};

// How tensor data is compressed.
struct Compression {
  int zstd_level = 0;   // 0: no compression
  bool shuffle = true;  // group the elements' bytes first
};

inline constexpr Index kUsualFileBytes = 5'000'000'000;  // the size at which transformers starts a new file

struct LayoutRequest {
  std::vector<TargetTensor> tensors;  // in the order of the files
  std::vector<TargetBlob> blobs;
  Mesh mesh;
  std::optional<LayoutDescriptor> layout;  // the source of the placements, for formats that record it
  Index max_file_bytes = kUsualFileBytes;  // for formats that cut files by size
  Container container = Container::kSafetensors;
  std::optional<HeadCounts> heads;  // if a config gives them
  Compression compression;          // for formats that support it
  std::optional<Index> rank;        // for per-rank formats: lay out only this rank's files; nothing: all ranks'
  std::optional<Json> config = {};  // the model's config.json, if known
  std::vector<std::pair<std::string, std::string>> header_metadata = {};  // as Catalog's, for safetensors files
  // For StateSupport::kAdam: the optimizer's step count, if the source has it in tensors.
  std::optional<Index> step = {};
  // Returns the output's names of a parameter named by an object of the source: several if it is split. Null:
  // unchanged.
  std::function<std::vector<std::string>(const std::string& name)> renamed = nullptr;
};

// Returns the CRC-32 of the bytes of one target extent, which is known once they are written.
using PayloadCrc = std::function<std::uint32_t(const Extent& extent)>;
// Receives bytes that are not tensor data, for an offset in one of the target's files.
using EmitBytes = std::function<Status(std::uint32_t file, Index offset, Bytes bytes)>;

// A unit of encoded (for example compressed) data.
struct EncodedChunk {
  Index number = 0;           // index among all chunks of the output
  Index bytes = 0;            // stored size
  std::uint32_t filters = 0;  // a mask defined by the target: which filters it applied
};
using EmitChunk = std::function<Status(const EncodedChunk& chunk, Bytes stored)>;

// How a target stores its tensor data encoded. The catalog's extents are then offsets in an image of the plain data,
// which is passed to encode() instead of being written to the file.
class DataEncoder {
 public:
  virtual ~DataEncoder() = default;
  // Encodes bytes of the image from `offset` on and emits the chunks that they complete. Calls may come in any order,
  // with each byte once; one rank must pass all bytes of a tensor. Thread-safe.
  virtual Status encode(Index offset, Bytes bytes, const EmitChunk& emit) = 0;
  virtual Index chunk_count() const = 0;
  // Returns the file offset of a chunk. Called on one rank, for all chunks in the order of their numbers.
  virtual Result<Index> place(const EncodedChunk& chunk) = 0;
  virtual Index worker_bytes() const = 0;  // memory that encode() takes on each thread
};

// An output that is a single file at the destination path instead of a directory.
class SingleFile {
 public:
  virtual ~SingleFile() = default;
  // Returns whether the file at `path` is of this format and may be replaced.
  virtual Result<bool> is_own_file(const std::string& path) const = 0;
  // Stores a side file inside the output. Call before seal().
  virtual Status add_side_file(const std::string& name, std::string_view contents) = 0;
  // Returns the length of the sealed file, which differs from the catalog's if data was encoded or added.
  virtual Index sealed_size() const = 0;
};

// A planned output: every file, size, offset and length is fixed.
class Target {
 public:
  Target() = default;
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;
  virtual ~Target() = default;
  const Catalog& catalog() const { return catalog_; }  // its root is empty: the caller chooses the directory
  // Returns whether seal() needs payload checksums. They cost a pass over the bytes while these are in cache.
  virtual bool wants_crcs() const = 0;
  // Emits all bytes of all files that are not tensor data (headers, trailers, metadata), each byte once.
  virtual Status seal(const PayloadCrc& crc, const EmitBytes& emit) const = 0;
  // Emits the bytes of seal() that overlap `place`, and possibly more. Override to avoid computing checksums that the
  // range does not need. Thread-safe.
  virtual Status seal_at(const Extent& /*place*/, const PayloadCrc& crc, const EmitBytes& emit) const {
    return seal(crc, emit);
  }

  // Returns whether the files of tensors have LayoutRequest::header_metadata.
  virtual bool holds_header_metadata() const { return false; }

  DataEncoder* encoder() const { return encoder_; }         // null: tensor data is stored as it is
  SingleFile* single_file() const { return single_file_; }  // null: the output is a directory

  // Returns the length of a sealed file.
  Index sealed_size(std::uint32_t file) const {
    return single_file_ ? single_file_->sealed_size() : catalog_.files[file].size;
  }

 protected:
  Catalog catalog_;
  // Parts of the target itself, or null.
  DataEncoder* encoder_ = nullptr;
  SingleFile* single_file_ = nullptr;
};

// Which copy of the parameters is the model, in a training state that has two.
enum class Weights {
  kModel,   // those it computes with, usually bfloat16
  kMaster,  // the optimizer's float32 masters
};

struct OpenOptions {
  bool files_too = true;  // false: read only metadata; data files may be missing
  bool validated = true;  // false: do not validate() the catalog, so that an audit can list all faults
  // Open a checkpoint although files are damaged, if the others are of use: Catalog::unread_files has the damaged ones,
  // whose tensors are missing or not covered. If false, or if they are of no use, the error names all damaged files.
  bool skip_damaged = false;
  bool external_too = false;                 // follow links and external storage into other files
  KeyChanges keys = {};                      // the user's changes to plain keys
  const LayoutDescriptor* layout = nullptr;  // how ranks' files join; null: the reader infers it or fails
  Weights weights = Weights::kModel;         // kMaster requires Format::has_masters
  const Family* own_family = nullptr;  // a family described by the user, tried before the built-in ones; may be null
  std::string config = {};             // the model's config.json; empty: the one next to the checkpoint
};

// Returns which of `files` to restore, for a sentence: "it", "them" or "the others"; empty if none of them is lost.
std::string files_to_restore(const std::vector<UnreadFile>& files);

// Returns the error of a reader that has left files out, unless `options` allow that: it names all of them. `opened` is
// the reader's own result, which may be a consequence.
Status without_unread_files(Status opened, const Catalog& catalog, const OpenOptions& options);

// Implements Format::open for readers that have `Status open(const PathSnapshot&, const OpenOptions&)`.
template <class R>
Result<std::unique_ptr<Reader>> open_as(const PathSnapshot& place, const OpenOptions& options) {
  auto reader = std::make_unique<R>();
  TRY(without_unread_files(reader->open(place, options), reader->catalog(), options));
  return std::unique_ptr<Reader>(std::move(reader));
}

// The result of Format::write_view.
struct ViewReport {
  Index tensors = 0;                                         // tensors in the view
  Index joined = 0;                                          // fragments that virtual datasets consist of
  std::vector<std::pair<std::string, std::string>> refused;  // tensor names and reasons
};

// What a format can store of a training state.
enum class StateSupport {
  kEverything,
  kTensors,  // parameters and optimizer tensors, no other objects
  // Parameters and Adam's state (moments and a float32 master for each parameter, one step count for all), and the
  // objects that Format::takes_object accepts.
  kAdam,
  kModel,  // parameters only
};

// How a format's files relate to the ranks of a mesh.
enum class Sharding {
  kNone,      // whole tensors; the files do not depend on the mesh
  kStages,    // whole tensors, with separate files for each pipeline stage
  kBoxes,     // a rank's file holds the boxes that it owns, as the layout cuts files
  kLocal,     // a rank's file holds its local tensors, even if the layout has whole files
  kOwnLocal,  // as kLocal, but cut by the format's own rules without a layout
};

// A format: a row of the table in formats/registry.cc.
struct Format {
  std::string_view name;   // as in --to
  std::string_view title;  // for people
  // Returns whether the path looks like this format, judged by names and at most the first bytes. An error if it must
  // look further and cannot. Null: the format is never recognised.
  Result<bool> (*recognises)(const PathSnapshot& place);
  // Opens a checkpoint. Null if `recognises` is null.
  Result<std::unique_ptr<Reader>> (*open)(const PathSnapshot& place, const OpenOptions& options);
  // Null: the format cannot be written.
  Result<std::unique_ptr<Target>> (*lay_out)(LayoutRequest request);
  // Creates a file at `path`, replacing an existing one if `replace`, that shows the tensors of a located catalog
  // without copying their data. Null if the format cannot do that. The report lists the tensors it cannot express.
  Result<ViewReport> (*write_view)(const Catalog& catalog, const std::string& path, bool replace) = nullptr;

  StateSupport holds = StateSupport::kEverything;
  bool (*takes_object)(std::string_view key) = nullptr;  // with StateSupport::kAdam; takes a plain key
  // Returns whether a file that the reader uses has a name that the format's writers give, or that an index names.
  // Asked before --force removes files. Null: the reader uses no others.
  bool (*is_own_file)(const Catalog& catalog, std::string_view path) = nullptr;
  Sharding sharding = Sharding::kNone;
  bool is_file = false;                               // a checkpoint is one file that also contains the side files
  bool takes_container = false;                       // the user may choose LayoutRequest::container
  bool takes_compression = false;                     // the user may choose LayoutRequest::compression
  bool has_masters = false;                           // the user may choose OpenOptions::weights
  bool hf_names = false;                              // its loaders expect Hugging Face names
  std::string_view own_names = {};                    // the only names it can hold, as in --names
  Index vocab_divisible_by = 0;                       // default multiple of vocabulary rows, times tp; 0: none
  std::span<const std::string_view> side_files = {};  // side files that its loaders want besides the config
  std::string_view written_by = {};                   // how else to write it, if it is only read: two commands
  std::string (*library)() = nullptr;                 // the library that reads and writes it, and its version
  StageRule stage_rule = StageRule::kTorchtitan;      // how layers are distributed over pipeline stages
  Index max_file_bytes = 0;                           // default file size limit; 0: files are not cut by size
  bool shares_experts = false;                        // ep distributes whole experts and cuts no tensor

  bool takes_mesh() const { return sharding != Sharding::kNone; }
  bool holds_whole_tensors() const { return sharding == Sharding::kNone || sharding == Sharding::kStages; }
  bool holds_local_tensors() const { return sharding == Sharding::kLocal; }
  // Returns whether an adapter can be written next to the model.
  bool holds_adapter() const { return hf_names && holds == StateSupport::kModel && sharding == Sharding::kNone; }
  // Returns whether a training run resumes from the format with modules under the model's own names, so that the
  // parameters of adapters are among them.
  bool resumes_training() const { return holds == StateSupport::kAdam && hf_names; }
};

// Returns a row for a variant of a format that is only written; the original row reads both.
constexpr Format written_as(Format row, std::string_view name, std::string_view title,
                            decltype(Format::lay_out) lay_out) {
  row.name = name;
  row.title = title;
  row.recognises = nullptr;
  row.open = nullptr;
  row.lay_out = lay_out;
  return row;
}

// An open checkpoint and its format.
struct OpenCheckpoint {
  const Format* format = nullptr;
  std::unique_ptr<Reader> reader;
};
// Opens a checkpoint; see open_checkpoint() in formats/open.h.
using Opener = std::function<Result<OpenCheckpoint>(const std::string& path, const OpenOptions& options)>;
// Returns whether two objects have the same value; see have_same_value() in formats/object_values.h.
using SameValue = std::function<bool(std::string_view a, std::string_view b)>;

}  // namespace reshard
