// What a checkpoint format is to the rest of the program: a way to open one, a way to lay one out, or both.
//
// Opening reads metadata only. Laying out is pure: it decides every file, offset and length of the output before a byte
// is written, and later says what the bytes around the tensor data are. The I/O in between belongs to lib/engine.
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
  // Its files are opened by this pool from now on: for a reader that has several in it. Before anything is located.
  void use_files(const FilePool& files) { files_ = files; }

  // Finds the payloads of the tensors listed (indices into catalog().tensors()): reads the headers around them, checks
  // them against the metadata, and replaces item extents by payload extents and true strides. Other tensors stay as
  // they are. `spool` is a directory for what has to be decoded to be read at random; it must have room for it.
  virtual Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) = 0;

  // The value of a blob as a torch.save archive without storages, which is how blobs go from format to format.
  virtual Result<std::string> blob_bytes(const Blob& blob) = 0;

  // A file that lies beside the tensors (config.json, reshard_manifest.json), of at most `limit` bytes; or a
  // config.json that the format makes. Nothing when there is neither.
  virtual Result<std::optional<std::string>> side_file(const std::string& name, Index limit);

  // The first `length` bytes of such a file that is stored, or all of it where it is shorter.
  virtual Result<std::optional<std::string>> side_file_start(const std::string& name, Index length);

  // A blob's value in a few words, for people: "1000", "[0.9, 0.95]", "a dict of 4". Empty when it cannot be told.
  virtual std::string describe(const Blob& blob) = 0;

 protected:
  // Where side files are looked for, in order.
  virtual std::vector<std::string> side_directories() const { return {catalog_.root}; }
  // The config.json that follows from what a format keeps of the model in words of its own.
  virtual Result<std::optional<Json>> made_config() { return std::optional<Json>(); }

  Catalog catalog_;
  FilePool files_;
};

// A tensor to be written, and how it is to lie.
struct TargetTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  KeyPath path;
  SharedPlacement placement;
  std::string plain_key = {};  // as a Tensor's

  const std::string& key() const { return plain_key.empty() ? name : plain_key; }
};

// Non-tensor state to be written.
struct TargetBlob {
  std::string name;
  KeyPath path;
  std::string bytes;  // as Reader::blob_bytes gave them
};

// What holds the tensors in formats that keep them in files of either kind.
enum class Container { kSafetensors, kTorchSave };

// How many attention heads a model has; a head is never cut.
struct HeadCounts {
  Index query = 0;
  Index key_value = 0;
};

// How tensors are made smaller.
struct Compression {
  int zstd_level = 0;   // as zstd counts; 0: not at all
  bool shuffle = true;  // the elements' bytes grouped first
};

inline constexpr Index kUsualFileBytes = 5'000'000'000;  // as transformers cuts files

struct LayoutRequest {
  std::vector<TargetTensor> tensors;  // in the order they are to lie in the files
  std::vector<TargetBlob> blobs;
  Mesh mesh;
  std::optional<LayoutDescriptor> layout;  // where the placements come from; for formats that write it down
  Index max_file_bytes = kUsualFileBytes;  // for formats that cut files by size
  Container container = Container::kSafetensors;
  std::optional<HeadCounts> heads;  // where a config says so
  Compression compression;          // for formats that can
  std::optional<Index> rank;        // for what ranks hold: lay out what this one does; nothing: all of them
  std::optional<Json> config = {};  // the model's config.json, where there is one
  std::optional<Index> step = {};   // for Holds::kAdam: how many the optimizer's state has seen, where tensors say
  // What the output calls a parameter that an object of the source names: several tensors where it is taken apart.
  // Null: the same.
  std::function<std::vector<std::string>(const std::string& name)> renamed = nullptr;
};

// The CRC-32 of the bytes of one fragment's extent of a target, known once it is written.
using PayloadCrc = std::function<std::uint32_t(const Extent& extent)>;
// Receives bytes that are not tensor data: a place in one of the target's files.
using EmitBytes = std::function<Status(std::uint32_t file, Index offset, Bytes bytes)>;

// A part of what is stored in another form, encoded by itself.
struct EncodedChunk {
  Index number = 0;           // among all chunks of the output, in the order in which they lie
  Index bytes = 0;            // as it is stored
  std::uint32_t filters = 0;  // the target's own note of what was done to it
};
using EmitChunk = std::function<Status(const EncodedChunk& chunk, Bytes stored)>;

// An output that exists on paper: every file, size, offset and length fixed.
class Target {
 public:
  virtual ~Target() = default;
  const Catalog& catalog() const { return catalog_; }  // its root is empty: the directory is the caller's to choose
  // Whether seal() will ask for payload checksums: they cost a pass over the bytes while those are in cache.
  virtual bool wants_crcs() const = 0;
  // Emits all bytes of all files that are not tensor data: headers, trailers, metadata. Each byte once.
  virtual Status seal(const PayloadCrc& crc, const EmitBytes& emit) const = 0;
  // For who reads an output by stretches: emits at least what of seal()'s bytes shares any with `place`, none of it
  // wrong, and asks for no more checksums than that needs. Unless a target can do with less, all of them. Thread-safe.
  virtual Status seal_at(const Extent& /*place*/, const PayloadCrc& crc, const EmitBytes& emit) const {
    return seal(crc, emit);
  }

  // Whether the output is a file, the destination itself, and not a directory. Its catalog has one file.
  virtual bool is_file() const { return false; }
  // Of an output that is a file: whether the one at `path` is of its kind, and may be replaced.
  virtual bool is_own_file(const std::string&) const { return false; }
  // Takes in, before seal(), what others have as a file beside the tensors.
  virtual Status add_side_file(const std::string& name, std::string_view contents);

  // Whether tensor data are stored in another form. The extents of the catalog then are places in an image of the plain
  // data, which is written to encode() and not to the file.
  virtual bool encodes() const { return false; }
  // Encodes the bytes of the image from `offset` on, each byte once, in any order, and hands on the chunks that they
  // complete. All bytes of a tensor come to one rank. Thread-safe.
  virtual Status encode(Index offset, Bytes bytes, const EmitChunk& emit);
  virtual Index chunk_count() const { return 0; }
  // Where in the file a chunk lies: asked on one rank, for each in the order of their numbers.
  virtual Result<Index> place(const EncodedChunk& chunk);
  virtual Index worker_bytes() const { return 0; }  // that encode() takes for each thread

  // The length of a file, once sealed; what its catalog says where nothing is encoded or added.
  virtual Index sealed_size(std::uint32_t file) const { return catalog_.files[file].size; }

 protected:
  Catalog catalog_;
};

// Of a training state that has its parameters twice, which of them are the model.
enum class Weights {
  kModel,   // what it computes with, in bfloat16 as a rule
  kMaster,  // the optimizer's float32 masters of them
};

struct OpenOptions {
  bool files_too = true;  // false: be content with the metadata; files may be missing
  bool validated = true;  // false: the catalog's claims are the caller's to check (an audit lists all that is wrong)
  bool external_too = false;                 // follow links and storage into other files
  KeyChanges keys = {};                      // to the plain keys of what it holds
  const LayoutDescriptor* layout = nullptr;  // how the files of ranks join; null: the reader finds out, or refuses
  Weights weights = Weights::kModel;         // masters are for formats that have them (Format::has_masters)
  const Family* own_family = nullptr;        // that the user describes, known before the program's; null: none
};

// Format::open of readers that have a `Status open(const PathSnapshot&, const OpenOptions&)`.
template <class R>
Result<std::unique_ptr<Reader>> open_as(const PathSnapshot& place, const OpenOptions& options) {
  auto reader = std::make_unique<R>();
  TRY(reader->open(place, options));
  return std::unique_ptr<Reader>(std::move(reader));
}

// What came of a view.
struct ViewReport {
  Index tensors = 0;                                         // shown
  Index joined = 0;                                          // fragments that virtual datasets are made of
  std::vector<std::pair<std::string, std::string>> refused;  // names of tensors, and why
};

// What a format holds of a training state.
enum class Holds {
  kEverything,
  kTensors,  // parameters and optimizer state, no other objects
  // Parameters and Adam's state: moments and a float32 master of each parameter, one number of steps for all, and the
  // objects that Format::takes_object names.
  kAdam,
  kModel,  // parameters alone
};

// How a format's files follow the ranks of a mesh.
enum class Sharding {
  kNone,      // whole tensors: the mesh leaves no trace
  kStages,    // whole tensors, those of a pipeline stage in files of their own
  kBoxes,     // a rank's file holds the boxes that it owns, cut as the layout says that files are
  kLocal,     // a rank's file holds its local tensors, even where the layout says that files are whole
  kOwnLocal,  // likewise, cut by the format's own rules and no layout
};

// A row of the table in formats/registry.cc.
struct Format {
  std::string_view name;   // as in --to
  std::string_view title;  // for people
  // Whether the directory or file looks like this format: by names, and first bytes at most. An error where it has to
  // look further and cannot. Null: nothing does.
  Result<bool> (*recognises)(const PathSnapshot& place);
  // Null where nothing is recognised.
  Result<std::unique_ptr<Reader>> (*open)(const PathSnapshot& place, const OpenOptions& options);
  Result<std::unique_ptr<Target>> (*lay_out)(LayoutRequest request);  // null: cannot be written
  // Makes a file at `path`, or replaces the one there if told, that shows the tensors of a located catalog where they
  // lie, without copying; null: not that kind of format. What it cannot express is in the report.
  Result<ViewReport> (*write_view)(const Catalog& catalog, const std::string& path, bool replace) = nullptr;

  Holds holds = Holds::kEverything;
  bool (*takes_object)(std::string_view key) = nullptr;  // with Holds::kAdam; by its plain key
  Sharding sharding = Sharding::kNone;
  bool is_file = false;                               // a checkpoint is one file; what lies beside others is inside it
  bool takes_container = false;                       // LayoutRequest::container is for the user to choose
  bool takes_compression = false;                     // and LayoutRequest::compression
  bool has_masters = false;                           // OpenOptions::weights is for the user to choose
  bool hf_names = false;                              // its loaders expect Hugging Face names
  std::string_view own_names = {};                    // the names that it holds and no others, as in --names
  Index vocab_divisible_by = 0;                       // of rows, times tp, unless the user says; 0: any number will do
  std::span<const std::string_view> side_files = {};  // beside the config, what its loaders want there
  std::string (*library)() = nullptr;                 // that reads and writes it, and its version
  StageRule stage_rule = StageRule::kTorchtitan;      // how layers are dealt out to pipeline stages
  Index max_file_bytes = 0;                           // unless the user says otherwise; 0: files are not cut by size
  bool shares_experts = false;                        // ep of the mesh deals whole experts out, and cuts nothing

  bool takes_mesh() const { return sharding != Sharding::kNone; }
  bool holds_whole_tensors() const { return sharding == Sharding::kNone || sharding == Sharding::kStages; }
  bool holds_local_tensors() const { return sharding == Sharding::kLocal; }
  // Returns whether an adapter can be written next to the model.
  bool holds_adapter() const { return hf_names && holds == Holds::kModel && sharding == Sharding::kNone; }
  // Returns whether a training run resumes from the format with modules under the model's own names, so that the
  // parameters of adapters are among them.
  bool resumes_training() const { return holds == Holds::kAdam && hf_names; }
};

// The row of another form of a format, that is written alone: what reads the one reads both.
constexpr Format written_as(Format row, std::string_view name, std::string_view title,
                            decltype(Format::lay_out) lay_out) {
  row.name = name;
  row.title = title;
  row.recognises = nullptr;
  row.open = nullptr;
  row.lay_out = lay_out;
  return row;
}

// A checkpoint of whichever format recognises the path, open.
struct OpenCheckpoint {
  const Format* format = nullptr;
  std::unique_ptr<Reader> reader;
};
// Opens one; open_checkpoint of formats/open.h.
using Opener = std::function<Result<OpenCheckpoint>(const std::string& path, const OpenOptions& options)>;

}  // namespace reshard
