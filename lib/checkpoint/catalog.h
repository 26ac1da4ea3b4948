// SPDX-License-Identifier: Apache-2.0
// The Catalog: which box of which tensor is stored at which bytes of which file. Opening a checkpoint of any format
// yields one; choosing a target format and layout yields another before any byte is written. Everything else in this
// program queries catalogs or copies between two of them.
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

// A range of bytes in one of the catalog's files.
struct Extent {
  std::uint32_t file = 0;  // an index into Catalog::files
  Index offset = 0;        // bytes
  Index length = 0;        // bytes

  friend bool operator==(const Extent&, const Extent&) = default;
};

// A stored box of a tensor. Its elements are in `extent`: the element at box.origin is `start` bytes into it, and the
// others are `strides` elements apart.
struct Fragment {
  Box box;
  Dims strides;                      // in elements; may exceed the row-major ones; readers refuse negative ones
  Extent extent;                     // the payload, or before Reader::locate() the stored item that contains it
  Index start = 0;                   // bytes from extent.offset
  std::optional<std::uint32_t> crc;  // CRC-32 of the whole extent, if the format records one
  bool big_endian = false;
  std::shared_ptr<const ChunkEncoding> encoding;  // if set, `start` counts in the decoded bytes of the extent

  // Returns the number of bytes that `start` and `strides` address.
  Index payload_bytes() const { return encoding ? encoding->decoded_bytes : extent.length; }

  friend bool operator==(const Fragment&, const Fragment&) = default;
};

// Returns a box whose elements are in the extent one after the other, in row-major order.
Fragment dense_fragment(const Box& box, const Extent& extent);

// The extents of one tensor's fragments, in order. A list of one allocates nothing.
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
  // Shrinks the list, and compresses regular runs: ranks that write equal parts have equal offsets and lengths.
  void pack();

 private:
  static constexpr std::uint32_t kNoFile = ~std::uint32_t{0};
  // Extents with equal offset and length in files whose numbers are `step` apart.
  struct Run {
    Extent first;
    std::uint32_t begin = 0;  // list index of `first`
    std::uint32_t step = 0;
  };
  struct Several {
    std::vector<Extent> each = {};
    std::vector<Run> runs = {};  // replaces `each` once packed
    std::size_t packed = 0;      // number of extents in `runs`

    std::size_t size() const { return runs.empty() ? each.size() : packed; }
    Extent get(std::size_t i) const { return runs.empty() ? each[i] : of_run(i); }
    Extent of_run(std::size_t i) const;
  };
  // For modification; unpacks.
  std::vector<Extent>& each();

  Extent one_{kNoFile, 0, 0};         // of a list of one
  std::unique_ptr<Several> several_;  // null: at most one extent
};

// The fragments of one tensor, stored in columns because a large model's checkpoint has millions. Copies share the
// columns until one of them changes, and lists with equal boxes can share those (BoxPool).
class FragmentList {
 public:
  explicit FragmentList(int rank = 0) : columns_(none(rank)) {}
  FragmentList(const FragmentList&) = default;
  FragmentList& operator=(const FragmentList&) = default;
  // Moved-from lists are empty: columns_ is never null.
  FragmentList(FragmentList&& from) noexcept : columns_(std::exchange(from.columns_, none(from.rank()))) {}
  FragmentList& operator=(FragmentList&& from) noexcept;
  ~FragmentList() = default;

  std::size_t size() const { return columns_->extents.size(); }
  bool empty() const { return size() == 0; }
  void reserve(std::size_t n);
  void add(const Fragment& fragment);              // must have this list's rank
  void add(const Box& box, const Extent& extent);  // row-major from the extent's first byte
  void set(std::size_t i, const Fragment& fragment);
  Fragment get(std::size_t i) const;
  Box box(std::size_t i) const;
  Extent extent(std::size_t i) const { return columns_->extents[i]; }
  void set_extent(std::size_t i, const Extent& extent) { own().extents.set(i, extent); }
  // Shrinks the list to the memory it needs. Does nothing if copies share it.
  void pack();
  bool has_encoded() const { return !rare().encodings.empty(); }  // false: no fragment has an encoding
  bool has_crcs() const { return !rare().crcs.empty(); }          // false: no fragment has a CRC
  // Returns whether both lists have the same boxes in the same order, as in the layers of a model.
  bool has_boxes_of(const FragmentList& other) const {
    return columns_->boxes == other.columns_->boxes || *columns_->boxes == *other.columns_->boxes;
  }
  // Equal lists of boxes have equal hashes.
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
  // Members that few fragments have.
  struct Details {
    Dims strides;
    Index start = 0;
    bool big_endian = false;
  };
  // Members that few lists have.
  struct Rare {
    std::vector<std::uint64_t> crcs;  // kNoCrc if a fragment has none; empty if no fragment has one
    std::unordered_map<std::size_t, Details> details;
    std::vector<std::shared_ptr<const ChunkEncoding>> encodings;  // the distinct encodings, few; the first is null
    std::vector<std::uint16_t> encoding_of;                       // index for each fragment; empty if none is encoded
  };
  struct Columns {
    explicit Columns(SharedBoxes b) : boxes(std::move(b)) {}
    Columns(const Columns& from);
    Columns& operator=(const Columns&) = delete;

    SharedBoxes boxes;
    ExtentList extents = {};
    std::unique_ptr<Rare> rare = nullptr;  // null: none of its members is set
  };
  static const std::shared_ptr<Columns>& none(int rank);
  int rank() const { return columns_->boxes->rank; }
  // For modification; unshare first.
  Columns& own();
  std::vector<Index>& own_corners();
  Rare& own_rare();
  const Rare& rare() const;

  std::shared_ptr<Columns> columns_;
};

// Lets lists with equal boxes, as in the layers of a model, share their memory.
class BoxPool {
 public:
  void share(FragmentList& list);

 private:
  std::vector<FragmentList::SharedBoxes> recent_;  // the last few distinct lists seen
  std::size_t oldest_ = 0;                         // next to be replaced, once `recent_` is full
};

// The path of a value in the nested state_dict, as in DCP's planner_data. Integers are list positions.
using KeyPath = std::vector<std::variant<std::string, Index>>;
std::string dotted_name(const KeyPath& path);  // "optimizer.state.0.exp_avg"

struct Tensor {
  std::string name;       // the flattened key, torch's FQN
  std::string plain_key;  // the name without its wrapping (lib/model/parts.h); empty: same as `name`
  DType dtype = DType::kFloat32;
  // The dtype that the model computes in, if only an optimizer's wider values are stored (ZeRO-3's float32 masters).
  // Copies of the tensor have this dtype unless another is requested.
  std::optional<DType> model_dtype;
  bool located = true;       // whether extents are payloads (see Fragment::extent)
  bool is_buffer = false;    // the writer says it is not a parameter: derived data, unless a family knows it
  bool is_key_told = false;  // the reader set plain_key; otherwise it is derived from the names
  Dims shape;
  FragmentList fragments;  // cover the shape exactly once
  FragmentList replicas;   // further copies of boxes in `fragments`
  KeyPath path;            // empty means {name}
  // Rows whose bytes interleave in the file (one attention head). Work is best split between groups.
  Index row_group = 1;
  // The last dimension of `shape`, if a view divides a dimension of n elements into [n / columns, columns], because
  // another naming convention stores these columns as separate tensors (StoredRule::columns). 1: not divided.
  Index columns = 1;

  // Takes what Reader::locate() finds out from the same tensor of another catalog.
  void take_location(const Tensor& other);
  // Returns the shape with divided dimensions joined again.
  Dims joined_shape() const;
  const std::string& key() const { return plain_key.empty() ? name : plain_key; }
  Index elements() const { return volume(shape); }
  Index bytes() const { return elements() * byte_size(dtype); }
};

// Returns whether two tensors are the same bytes of the same files.
bool is_same_data(const Tensor& a, const Tensor& b);

// A value that is not a tensor. Its stored bytes are copied and never executed.
struct Blob {
  std::string name;
  Extent extent;
  KeyPath path;
  std::string plain_key = {};       // as in Tensor
  std::vector<Extent> copies = {};  // further stored copies of the same value
  bool is_key_told = false;         // as in Tensor

  const std::string& key() const { return plain_key.empty() ? name : plain_key; }
};

// A part of a training state, such as the model or one optimizer, and how it was recognised.
struct Part {
  StateKind kind = StateKind::kModel;
  std::string prefix;    // prefix of its names, "app.model."; may be empty
  std::string name;      // as in --part: "model", "optimizer_1", "ema"
  std::string evidence;  // for people; empty if the names are plain
  bool is_told = false;  // listed by the reader; otherwise derived from the names
};

struct CatalogFile {
  std::string path;   // relative to Catalog::root
  Index size = -1;    // bytes; -1: the file is missing
  Index writer = -1;  // the rank that wrote it; -1: unknown
};

// A file of tensors that could not be read, or that lacks tensors.
struct UnreadFile {
  Error why;                              // names the file
  std::vector<std::string> tensors = {};  // in it, as other files say; empty: unknown
  bool is_denied = false;                 // access was denied, so the file may be whole
  bool is_index_wrong = false;            // other files have the tensors, as `why` says: there is nothing to restore
};

class Catalog {
 public:
  std::string root;  // the checkpoint's directory
  std::vector<CatalogFile> files;
  std::vector<UnreadFile> unread_files;  // of an open checkpoint: none unless OpenOptions::skip_damaged
  std::vector<Blob> blobs;
  std::vector<Part> parts;  // set by find_parts() (lib/model/parts.h); empty before
  std::vector<std::string>
      metadata_files;  // relative to root: read to find the tensors, but without tensor data (an index)
  // A metadata file that names this checkpoint as the newest of its run. Training may rewrite it.
  std::string latest_file;
  std::vector<std::string> stale_files;  // in the directory, but not part of the checkpoint
  std::vector<std::string> warnings;     // whole sentences
  std::vector<std::string> notes;        // like warnings, but possibly harmless
  // The warning that a config would settle, because a tensor's shape was only inferred from its fragments.
  std::string shape_doubt;
  // Fragments may overlap in their bytes: views of one torch.save storage, or, before locate(), fragments recorded with
  // the extent of the blob that contains them.
  bool shares_extents = false;
  // The files also contain bytes that belong to no tensor or object, such as the nodes of a tree.
  bool has_other_bytes = false;
  // The number of words in the vocabulary, if the writer records it: further rows of an embedding are padding, whatever
  // they hold. 0: unknown.
  Index vocabulary = 0;
  // All tensors belong to one model and have the names that its loaders expect (Format::hf_names), or to a copy of one.
  bool has_model_names = false;
  // Not empty: the tensors are not a model's but what changed in one (lib/convert/delta_chain.h), and this is the path
  // of the model before.
  std::string delta_of;
  bool lacks_optimizer = false;  // saved by a training run, but its optimizer state is missing
  std::vector<std::pair<std::string, std::string>> attributes;  // what the format records of its writer, for people
  // What the headers of safetensors files say (__metadata__), except how they cut tensors. torchao stores there
  // what its packed tensors cannot be loaded without (lib/convert/header_metadata.h).
  std::vector<std::pair<std::string, std::string>> header_metadata;

  // Returns a catalog with the files, objects and facts of this one that apply to any view of its tensors, and without
  // tensors: the start of a view.
  Catalog without_tensors() const;
  // Makes room for `tensors` tensors, without their names, after asking for the memory (may_take()).
  Status reserve(std::size_t tensors);
  static constexpr Index kTensorBytes = sizeof(Tensor) + 144;  // memory reserved for each
  // Adds a tensor; a second one of the same name is a corrupt error.
  Status add(Tensor tensor);
  // Copies of a catalog share its tensors until one of them changes.
  const std::vector<Tensor>& tensors() const { return held().tensors; }
  std::vector<Tensor>& own_tensors() { return own().tensors; }       // for modification, but not of names
  Tensor& tensor(std::size_t i) { return own_tensors()[i]; }         // one of them
  void share_tensors(const Catalog& other) { held_ = other.held_; }  // replaces this catalog's tensors by the other's
  std::optional<std::size_t> find(std::string_view name) const;
  std::optional<std::size_t> find_parameter(std::string_view key) const;  // of the model, by its plain key
  // Sorts as people expect: layers.2 before layers.10.
  void sort_by_name();

  std::string file_path(std::uint32_t file) const;
  // Returns the path that errors name: that of the file if the checkpoint is a single one, otherwise the directory.
  std::string where() const;
  std::vector<std::string> file_paths() const;  // of all files
  Index tensor_bytes() const;

 private:
  struct Held {
    std::vector<Tensor> tensors;
    NumberTable by_name;

    void find_places(std::size_t room);
  };
  const Held& held() const;
  Held& own();  // for modification; unshares first

  std::shared_ptr<Held> held_;  // null: no tensors
  Index added_bytes_ = 0;       // approximate memory added since the last check against the limit
  BoxPool boxes_;
};

// Compares names with runs of digits compared as numbers.
bool natural_less(std::string_view a, std::string_view b);

// Checks every claim of a catalog: boxes are inside their tensors and cover them exactly once (replicas repeat a box of
// the cover), extents are inside files that exist, and in located tensors every element that the strides reach is
// inside the extent. Errors name tensor, box and file. With `files_too` = false files are not checked.
Status validate(const Catalog& catalog, bool files_too = true);

// A tensor (by index) that validate() would refuse, and the reason.
struct TensorFault {
  std::size_t tensor = 0;
  Error error;
};
// Returns all tensors that are refused; validate() returns the first error.
std::vector<TensorFault> tensor_faults(const Catalog& catalog, bool files_too);

// Returns the names of the tensors that unread files have, and of those whose boxes are not covered, in natural order.
std::vector<std::string> tensors_without_data(const Catalog& catalog);

// Returns the minimum size in bytes of each file.
std::vector<Index> bytes_needed(const Catalog& catalog);

// Checks that the fragments of one tensor cover it without holes or overlaps. O(n log n) for boxes that form a grid.
Status check_cover(const Tensor& tensor);

// Checks that no two fragments claim the same bytes. With kTies two tensors may have exactly the same extent (shared
// storages of a torch.save file); partial overlap is always an error. Checks nothing if catalog.shares_extents.
enum class SharedExtents { kRefused, kTies };
Status check_extents_disjoint(const Catalog& catalog, SharedExtents shared);

}  // namespace reshard
