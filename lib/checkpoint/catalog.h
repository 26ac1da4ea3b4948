// The Catalog: which box of which tensor lies at which bytes of which file. Opening a checkpoint, whatever wrote it,
// yields one; choosing a target format and layout yields another before any byte is written. Everything else in this
// program is a question about catalogs or a copy between two of them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "lib/base/number_table.h"
#include "lib/base/result.h"
#include "lib/checkpoint/state_key.h"
#include "lib/layout/box.h"
#include "lib/layout/chunk_encoding.h"
#include "lib/layout/dtype.h"

namespace reshard {

// A run of bytes in one of the catalog's files.
struct Extent {
  std::uint32_t file = 0;  // an index into Catalog::files
  Index offset = 0;        // bytes
  Index length = 0;        // bytes

  friend bool operator==(const Extent&, const Extent&) = default;
};

// A box of a tensor as it is stored: its elements lie in `extent`, the element at box.origin `start` bytes into it, the
// others `strides` elements apart.
struct Fragment {
  Box box;
  Dims strides;                      // elements, may exceed the row-major ones; negative ones are refused by readers
  Extent extent;                     // the payload; before Reader::locate, the stored item around it
  Index start = 0;                   // bytes from extent.offset
  std::optional<std::uint32_t> crc;  // CRC-32 of the whole extent, where the format records one
  bool big_endian = false;
  std::shared_ptr<const ChunkEncoding> encoding;  // the extent has to be decoded, and `start` counts in what it becomes

  // The bytes that `start` and `strides` move in.
  Index payload_bytes() const { return encoding ? encoding->decoded_bytes : extent.length; }

  friend bool operator==(const Fragment&, const Fragment&) = default;
};

// Where the fragments of one tensor lie, in their order. A list of one takes no memory of its own.
class ExtentList {
 public:
  ExtentList() = default;
  ExtentList(const ExtentList& from);
  ExtentList& operator=(const ExtentList&) = delete;

  std::size_t size() const { return several_ ? several_->size() : one_.file == kNoFile ? 0 : 1; }
  Extent operator[](std::size_t i) const { return several_ ? several_->get(i) : one_; }
  void reserve(std::size_t n);
  void add(const Extent& extent);
  void set(std::size_t i, const Extent& extent);
  // Takes no more memory than it needs, and less where extents are alike: those of ranks that write equal parts.
  void pack();

 private:
  static constexpr std::uint32_t kNoFile = ~std::uint32_t{0};
  // Extents of one offset and one length, in files whose numbers are `step` apart.
  struct Run {
    Extent first;
    std::uint32_t begin = 0;  // the number of the first
    std::uint32_t step = 0;
  };
  struct Several {
    std::vector<Extent> each = {};
    std::vector<Run> runs = {};  // in place of them, once packed
    std::size_t packed = 0;      // how many the runs stand for

    std::size_t size() const { return runs.empty() ? each.size() : packed; }
    Extent get(std::size_t i) const { return runs.empty() ? each[i] : of_run(i); }
    Extent of_run(std::size_t i) const;
  };
  // For changing them.
  std::vector<Extent>& each();

  Extent one_{kNoFile, 0, 0};         // of a list of one
  std::unique_ptr<Several> several_;  // null: one or none
};

// Fragments of one tensor, stored in columns: a checkpoint of a large model has millions. Copies share them until one
// of the two is changed, and lists of the same boxes may share these (BoxPool).
class FragmentList {
 public:
  explicit FragmentList(int rank = 0) : columns_(none(rank)) {}
  FragmentList(const FragmentList&) = default;
  FragmentList& operator=(const FragmentList&) = default;
  // What is moved from is empty: none is ever without columns.
  FragmentList(FragmentList&& from) noexcept : columns_(std::exchange(from.columns_, none(from.rank()))) {}
  FragmentList& operator=(FragmentList&& from) noexcept;
  ~FragmentList() = default;

  std::size_t size() const { return columns_->extents.size(); }
  bool empty() const { return size() == 0; }
  void reserve(std::size_t n);
  void add(const Fragment& fragment);              // of this list's rank
  void add(const Box& box, const Extent& extent);  // its elements in row-major order, from the extent's first byte on
  void set(std::size_t i, const Fragment& fragment);
  Fragment get(std::size_t i) const;
  Box box(std::size_t i) const;
  Extent extent(std::size_t i) const { return columns_->extents[i]; }
  void set_extent(std::size_t i, const Extent& extent) { own().extents.set(i, extent); }
  // Takes no more memory than it needs. Does nothing where copies share the list.
  void pack();
  bool has_encoded() const { return !rare().encodings.empty(); }  // false: no fragment has an encoding
  bool has_crcs() const { return !rare().crcs.empty(); }          // likewise, a CRC
  // Whether both have the same boxes in the same order: tensors of a model's layers do. Equal ones have equal hashes.
  bool has_boxes_of(const FragmentList& other) const {
    return columns_->boxes == other.columns_->boxes || *columns_->boxes == *other.columns_->boxes;
  }
  std::uint64_t hash_of_boxes() const;

 private:
  friend class BoxPool;
  struct Boxes {
    int rank = 0;
    std::vector<Index> corners = {};  // origin and shape of each

    std::size_t width() const { return 2 * static_cast<std::size_t>(rank); }
    friend bool operator==(const Boxes&, const Boxes&) = default;
  };
  using SharedBoxes = std::shared_ptr<Boxes>;
  // What few fragments have.
  struct Details {
    Dims strides;
    Index start = 0;
    bool big_endian = false;
  };
  // What few lists have.
  struct Rare {
    std::vector<std::uint64_t> crcs;  // kNoCrc where there is none; empty when no fragment has one
    std::unordered_map<std::size_t, Details> details;
    std::vector<std::shared_ptr<const ChunkEncoding>> encodings;  // those that occur: few; the first is none
    std::vector<std::uint16_t> encoding_of;                       // of each fragment; empty when none is encoded
  };
  struct Columns {
    explicit Columns(SharedBoxes b) : boxes(std::move(b)) {}
    Columns(const Columns& from);
    Columns& operator=(const Columns&) = delete;

    SharedBoxes boxes;
    ExtentList extents = {};
    std::unique_ptr<Rare> rare = nullptr;  // null: none of it
  };
  static const std::shared_ptr<Columns>& none(int rank);
  int rank() const { return columns_->boxes->rank; }
  // For changing them.
  Columns& own();
  std::vector<Index>& own_corners();
  Rare& own_rare();
  const Rare& rare() const;

  std::shared_ptr<Columns> columns_;
};

// Lets lists of equal boxes, as tensors of a model's layers have them, share the memory of these.
class BoxPool {
 public:
  void share(FragmentList& list);

 private:
  std::vector<FragmentList::SharedBoxes> recent_;  // of lists seen, the last few that differ
  std::size_t oldest_ = 0;                         // among them, once there are as many as are kept
};

// The path of a value in the nested state_dict, as DCP's planner_data has it; integers are list positions.
using KeyPath = std::vector<std::variant<std::string, Index>>;
std::string dotted_name(const KeyPath& path);  // "optimizer.state.0.exp_avg"

struct Tensor {
  std::string name;       // the flattened key, torch's FQN
  std::string plain_key;  // the name without what wraps it (lib/model/parts.h); empty: the name is plain
  DType dtype = DType::kFloat32;
  // What the model computes in, where only an optimizer's wider numbers are stored (ZeRO-3's float32 masters): a copy
  // of the tensor becomes this unless a dtype is asked for.
  std::optional<DType> model_dtype;
  bool located = true;       // whether extents are payloads yet
  bool is_buffer = false;    // the writer tells that it is no parameter: derived data, unless a family knows it
  bool is_key_told = false;  // the reader gave the plain key; otherwise it is found by the names
  Dims shape;
  FragmentList fragments;  // cover the shape exactly, once each
  FragmentList replicas;   // further copies of boxes in `fragments`
  KeyPath path;            // empty: {name}
  Index row_group = 1;  // rows whose bytes interleave in the file (one attention head): work is best cut between groups

  const std::string& key() const { return plain_key.empty() ? name : plain_key; }
  Index elements() const { return volume(shape); }
  Index bytes() const { return elements() * byte_size(dtype); }
};

// Whether two tensors are the same bytes of the same files.
bool is_same_data(const Tensor& a, const Tensor& b);

// A value that is not a tensor: carried as the bytes it is stored as, never executed.
struct Blob {
  std::string name;
  Extent extent;
  KeyPath path;
  std::string plain_key = {};       // as a tensor's
  std::vector<Extent> copies = {};  // of the same value, stored further times
  bool is_key_told = false;         // as a tensor's

  const std::string& key() const { return plain_key.empty() ? name : plain_key; }
};

// A part of a training state, and how it was told.
struct Part {
  StateKind kind = StateKind::kModel;
  std::string prefix;    // before its names, "app.model."; empty where nothing is
  std::string name;      // as --part takes it: "model", "optimizer_1", "ema"
  std::string evidence;  // for people; empty where the names are plain
  bool is_told = false;  // the reader lists it; otherwise it is found by the names
};

struct CatalogFile {
  std::string path;   // relative to Catalog::root
  Index size = -1;    // bytes; -1: it is missing
  Index writer = -1;  // the rank that wrote it; -1: nothing tells
};

class Catalog {
 public:
  std::string root;  // the checkpoint's directory
  std::vector<CatalogFile> files;
  std::vector<Blob> blobs;
  std::vector<Part> parts;                  // as find_parts (lib/model/parts.h) saw them; none before it
  std::vector<std::string> metadata_files;  // relative to root: read to find the tensors, but holding none (an index)
  std::string latest_file;                  // likewise, and names it as the newest of its run: may be written again
  std::vector<std::string> stale_files;     // in the directory, but belonging to no tensor or blob
  std::vector<std::string> warnings;        // whole sentences
  std::vector<std::string> notes;           // likewise, of what need not be a fault
  std::string shape_doubt;  // that of the warnings which a config settles: a shape is what its fragments add up to
  // Several fragments may lie in the same bytes (views of one torch.save storage), or, before locate, be recorded at
  // the place of a blob that holds them.
  bool shares_extents = false;
  // Words of the vocabulary, where the writer tells: the rows of an embedding beyond them pad it, whatever they hold.
  // 0: not told.
  Index vocabulary = 0;
  // All tensors are a model's, under the names of its loaders (Format::hf_names), or a copy of such a checkpoint.
  bool has_model_names = false;
  bool lacks_optimizer = false;  // a training run saved it, and the optimizer state that belongs beside it is not there
  std::vector<std::pair<std::string, std::string>> attributes;  // what the format tells of its writer, for people

  // Memory for so many tensors, without their names, is asked for (may_take()).
  Status reserve(std::size_t tensors);
  static constexpr Index kTensorBytes = sizeof(Tensor) + 144;  // of it, for each
  // Refuses a second tensor of the same name.
  Status add(Tensor tensor);
  // Copies of a catalog share its tensors until one of them changes any.
  const std::vector<Tensor>& tensors() const { return held().tensors; }
  std::vector<Tensor>& own_tensors() { return own().tensors; }       // for changing all of them but their names
  Tensor& tensor(std::size_t i) { return own_tensors()[i]; }         // or one
  void share_tensors(const Catalog& other) { held_ = other.held_; }  // has those of the other in place of its own
  std::optional<std::size_t> find(std::string_view name) const;
  std::optional<std::size_t> find_parameter(std::string_view key) const;  // of the model, by its plain key
  // In the order people expect: layers.2 before layers.10.
  void sort_by_name();

  std::string file_path(std::uint32_t file) const;
  std::vector<std::string> file_paths() const;  // of all files
  Index tensor_bytes() const;

 private:
  struct Held {
    std::vector<Tensor> tensors;
    NumberTable by_name;

    void find_places(std::size_t room);
  };
  const Held& held() const;
  Held& own();  // for changing it

  std::shared_ptr<Held> held_;  // null: no tensors
  Index added_bytes_ = 0;       // of memory that was not asked for, about
  BoxPool boxes_;
};

// Compares names so that runs of digits count as numbers.
bool natural_less(std::string_view a, std::string_view b);

// Every claim a catalog makes, checked: boxes lie inside their tensors, cover them exactly once (replicas repeat a box
// of the cover), item extents lie inside files that are there, and for located tensors every element the strides reach
// lies inside the extent. Errors name tensor, box and file. `files_too` = false leaves the files out: metadata alone.
Status validate(const Catalog& catalog, bool files_too = true);

// A tensor (its index) that validate() would refuse, and why.
struct TensorFault {
  std::size_t tensor = 0;
  Error error;
};
// All of them: what validate() says of the first.
std::vector<TensorFault> tensor_faults(const Catalog& catalog, bool files_too);

// How many bytes each file must have at least.
std::vector<Index> bytes_needed(const Catalog& catalog);

// The cover check for one tensor: no holes, no overlaps. O(n log n) for boxes that form a grid, whatever cut them.
Status check_cover(const Tensor& tensor);

// That no two fragments claim the same bytes. With kTies, two tensors may lie on exactly the same extent (shared
// storages of a torch.save file); a partial overlap never is right. Nothing is checked where the catalog says that
// fragments share extents.
enum class SharedExtents { kRefused, kTies };
Status check_extents_disjoint(const Catalog& catalog, SharedExtents shared);

}  // namespace reshard
