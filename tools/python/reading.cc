// SPDX-License-Identifier: Apache-2.0
#include "tools/python/reading.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/convert/steps.h"
#include "lib/device/copy.h"
#include "tools/commands.h"

namespace reshard::python {
namespace {

constexpr Index kSlab = 1 << 20;       // bytes read in one call
constexpr Index kOneThread = 8 << 20;  // up to these bytes, more threads are not faster
constexpr Index kSkipped = 4096;       // gaps of at least these bytes are not read

// A part of a selection that is read in one call: a run of indices of one dimension, one index of each earlier
// dimension, and all selected indices of the later ones. It is contiguous in the output.
struct Slab {
  Box box;        // of the tensor
  Dims shape;     // of the output
  Index at = 0;   // its first element in the output
  bool is_plain;  // every element of the box is wanted
};

// The slabs of a selection, numbered.
class Selection {
 public:
  Selection(const std::vector<Range>& ranges, Index element_bytes) : ranges_(ranges), rank_(std::ssize(ranges)) {
    // Bytes from the first to the last selected byte, and elements of the output, by dimension.
    std::vector<Index> span(ranges.size() + 1, element_bytes);
    std::vector<Index> inner(ranges.size() + 1, 1);
    // Bytes between neighbouring indices that are not selected, by dimension; a lower bound.
    std::vector<Index> apart(ranges.size(), 0);
    for (Index d = rank_ - 1; d >= 0; --d) {
      const Range& r = range(d);
      span[index(d)] = span[index(d + 1)] * std::max<Index>(r.step * (r.count - 1) + 1, 0);
      inner[index(d)] = inner[index(d + 1)] * r.count;
      apart[index(d)] = span[index(d + 1)] * (r.step - 1);
    }
    elements_ = inner[0];
    if (elements_ == 0 || rank_ == 0) return;
    while (dim_ < rank_ - 1 && (span[index(dim_ + 1)] > kSlab || is_apart(apart, dim_))) ++dim_;
    const Range& r = range(dim_);
    const Index each = span[index(dim_ + 1)];
    run_ = apart[index(dim_)] >= kSkipped ? 1 : std::clamp<Index>(kSlab / (each * r.step), 1, r.count);
    runs_ = ceil_div(r.count, run_);
    inner_ = inner[index(dim_ + 1)];
  }

  Index elements() const { return elements_; }
  Index count() const {
    if (elements_ == 0) return 0;
    Index n = runs_;
    for (Index d = 0; d < dim_; ++d) n *= range(d).count;
    return n;
  }

  Slab slab(Index number) const {
    Slab out;
    const Index first = number % runs_ * run_;
    Index before = number / runs_;
    out.box.origin = out.box.shape = out.shape = Dims::filled(static_cast<int>(rank_), 1);
    out.is_plain = true;
    out.at = 0;
    Index width = rank_ == 0 ? 1 : inner_ * range(dim_).count;
    for (Index d = dim_ - 1; d >= 0; --d) {
      const Index i = before % range(d).count;
      before /= range(d).count;
      out.box.origin[static_cast<int>(d)] = range(d).start + i * range(d).step;
      out.at += i * width;
      width *= range(d).count;
    }
    out.at += first * inner_;
    for (Index d = dim_; d < rank_; ++d) {
      const Range& r = range(d);
      const Index n = d == dim_ ? std::min(run_, r.count - first) : r.count;
      out.box.origin[static_cast<int>(d)] = r.start + (d == dim_ ? first * r.step : 0);
      out.box.shape[static_cast<int>(d)] = (n - 1) * r.step + 1;
      out.shape[static_cast<int>(d)] = n;
      out.is_plain = out.is_plain && (r.step == 1 || n == 1);
    }
    return out;
  }

  // Returns the strides, in elements of the slab's box, at which the elements of the output are.
  Dims strides(const Slab& slab) const {
    Dims out = row_major_strides(slab.box.shape);
    for (Index d = dim_; d < rank_; ++d) out[static_cast<int>(d)] *= range(d).step;
    return out;
  }

 private:
  static std::size_t index(Index d) { return static_cast<std::size_t>(d); }
  const Range& range(Index d) const { return ranges_[index(d)]; }
  // Returns whether a later dimension has gaps that are large enough not to be read.
  bool is_apart(const std::vector<Index>& apart, Index d) const {
    for (Index i = d + 1; i < rank_; ++i)
      if (apart[index(i)] >= kSkipped) return true;
    return false;
  }

  const std::vector<Range>& ranges_;
  Index rank_;
  Index dim_ = 0;  // the dimension that is cut into runs
  Index run_ = 1;  // indices in a run
  Index runs_ = 1;
  Index inner_ = 1;  // elements of the output per index of dim_
  Index elements_ = 0;
};

// Returns the most threads of one read: two per core, because half of them wait for the disk.
int most_threads() { return 2 * thread_count(0); }

// Returns a host for code that parses the options of a command without running it.
tools::Host quiet_host(const tools::Environment& environment) {
  static const std::atomic<bool> kNever{false};
  tools::Host host;
  host.interrupt = &kNever;
  host.environment = environment;
  return host;
}

Status interrupted() { return Error(ErrorCode::kIo, "interrupted"); }

// The format of a view, which is never written.
const Format kView = {.name = "view",
                      .title = "a view",
                      .recognises = nullptr,
                      .open = nullptr,
                      .lay_out = nullptr,
                      .write_view = [](const Catalog&, const std::string&, bool) -> Result<ViewReport> {
                        return internal_error("a view cannot be written");
                      }};

}  // namespace

Result<std::shared_ptr<LazyCheckpoint>> LazyCheckpoint::open(const std::string& path,
                                                             const std::vector<std::string>& words,
                                                             const tools::Environment& environment) {
  tools::Host host = quiet_host(environment);
  const tools::HostScope scope(host);
  tools::SourceOptions options;
  TRY(tools::parse_options(words, [&](tools::CommandLine& line) { options.add(line); }));
  std::shared_ptr<LazyCheckpoint> out(new LazyCheckpoint(path, words, environment));
  out->spool_ = tools::temporary_directory();
  out->open_ = std::make_unique<OpenCheckpoint>(TRY(options.open(path)));
  out->part_ = options.part;
  out->is_located_.resize(out->catalog().tensors().size());
  out->reader().catalog().own_tensors();  // locate() must not replace them while another thread reads
  out->source_ = std::make_unique<FileSource>(out->catalog(), out->reader().files());
  return out;
}

Result<WantedOptions> wanted_options(const std::string& path, const std::vector<std::string>& words,
                                     const tools::Environment& environment) {
  tools::Host host = quiet_host(environment);
  const tools::HostScope scope(host);
  tools::ConvertOptions options;
  std::vector<std::string> line = words;
  for (const Format* format : formats())
    if (format->holds_local_tensors() && format->lay_out) line.push_back("--to=" + std::string(format->name));
  line.insert(line.end(), {"--", path});
  TRY(tools::parse_options(line, [&](tools::CommandLine& l) { options.add(l, false); }));
  WantedOptions out;
  out.conversion = TRY(options.conversion_options());
  out.conversion.spool = tools::temporary_directory();
  out.source_layout = TRY(options.source_layout.load());
  out.open.keys = TRY(options.source_layout.keys());
  out.open.weights = TRY(options.source_layout.which_weights());
  return out;
}

Result<std::shared_ptr<LazyCheckpoint>> LazyCheckpoint::view(const std::vector<std::string>& words) const {
  if (own_) return usage_error(path_ + ": a view of a view is not supported; create it from the checkpoint");
  ConversionOptions o = TRY(wanted_options(path_, words, environment_)).conversion;
  o.selection.part = part_;
  // A view has a reader of its own, because making the draft changes the reader's catalog.
  std::shared_ptr<LazyCheckpoint> out = TRY(open(path_, words_, environment_));
  const Draft draft = TRY(make_draft(out->reader(), kView, o));
  out->own_ = TRY(name_view(draft.view, draft.names, o.typing));
  out->own_->root = out->reader().catalog().root;
  out->is_located_.assign(out->own_->tensors().size(), true);
  out->source_ = std::make_unique<FileSource>(*out->own_, out->reader().files());
  return out;
}

const InferredMesh& LazyCheckpoint::mesh() {
  const std::shared_lock located(catalog_mutex_);
  const std::lock_guard lock(mutex_);
  if (!mesh_) mesh_ = infer_mesh(catalog());
  return *mesh_;
}

Status LazyCheckpoint::locate(std::size_t tensor) {
  {
    const std::shared_lock lock(catalog_mutex_);
    if (is_located_[tensor]) return {};
  }
  const std::unique_lock lock(catalog_mutex_);
  if (is_located_[tensor]) return {};
  TRY(reader().locate({tensor}, 0, spool_));
  is_located_[tensor] = true;
  return {};
}

Result<std::vector<PlacedPiece>> LazyCheckpoint::pieces(std::size_t tensor) {
  TRY(locate(tensor));
  const std::shared_lock lock(catalog_mutex_);
  const Tensor& t = catalog().tensors()[tensor];
  std::vector<PlacedPiece> out;
  for (const FragmentList* list : {&t.fragments, &t.replicas})
    for (std::size_t i = 0; i < list->size(); ++i) {
      const Fragment f = list->get(i);
      out.push_back({catalog().files[f.extent.file].path, f.extent.offset + (f.encoding ? 0 : f.start),
                     f.extent.length - (f.encoding ? 0 : f.start), f.box, list == &t.replicas});
    }
  return out;
}

std::vector<LazyCheckpoint::ReadBuffers> LazyCheckpoint::take_buffers(std::size_t count) {
  const std::lock_guard lock(mutex_);
  const std::size_t kept = std::min(count, buffers_.size());
  const auto begin = buffers_.end() - static_cast<std::ptrdiff_t>(kept);
  std::vector<ReadBuffers> out(std::make_move_iterator(begin), std::make_move_iterator(buffers_.end()));
  buffers_.erase(begin, buffers_.end());
  out.resize(count);
  return out;
}

void LazyCheckpoint::give_back(std::vector<ReadBuffers> rooms) {
  const std::lock_guard lock(mutex_);
  for (ReadBuffers& room : rooms)
    if (std::ssize(buffers_) < most_threads()) buffers_.push_back(std::move(room));
}

Status LazyCheckpoint::read(std::size_t tensor, const std::vector<Range>& ranges, std::byte* out, Watch& watch) {
  TRY(locate(tensor));
  const Index element = byte_size(catalog().tensors()[tensor].dtype);
  const Selection selection(ranges, element);
  const Index bytes = selection.elements() * element;
  watch.total = bytes;
  const int threads = bytes <= kOneThread ? 1 : most_threads();
  std::vector<ReadBuffers> rooms = take_buffers(static_cast<std::size_t>(threads));
  const Status status = parallel_for(selection.count(), threads, [&](int thread, Index number) -> Status {
    if (watch.interrupt) return interrupted();
    const std::shared_lock lock(catalog_mutex_);  // for one slab, because another thread may wait to locate a tensor
    const Slab slab = selection.slab(number);
    ReadBuffers& room = rooms[static_cast<std::size_t>(thread)];
    const auto wanted = static_cast<std::size_t>(volume(slab.shape) * element);
    const auto whole = static_cast<std::size_t>(volume(slab.box) * element);
    // Gaps between a box's elements in the file are read too, so scratch has room for up to a slab of them.
    room.scratch.resize(std::max(room.scratch.size(), std::min(2 * whole + 4096, static_cast<std::size_t>(kSlab))));
    std::byte* to = out + slab.at * element;
    if (slab.is_plain) {
      TRY(source_->read(tensor, slab.box, {to, wanted}, room.scratch));
    } else {
      room.box.resize(std::max(room.box.size(), whole));
      TRY(source_->read(tensor, slab.box, MutableBytes(room.box).first(whole), room.scratch));
      copy_box(slab.shape, element, room.box.data(), selection.strides(slab), to, row_major_strides(slab.shape));
    }
    watch.done += static_cast<Index>(wanted);
    return {};
  });
  give_back(std::move(rooms));
  return status;
}

}  // namespace reshard::python
