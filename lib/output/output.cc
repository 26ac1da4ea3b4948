// SPDX-License-Identifier: Apache-2.0
#include "lib/output/output.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <set>
#include <span>
#include <utility>

#include "lib/base/names.h"
#include "lib/base/output_guard.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/copy.h"
#include "lib/device/crc32.h"
#include "lib/output/work_directory.h"
#include "lib/source/piece_rows.h"
#include "lib/source/pieces.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr Index kMinDirect = Index{128} << 10;  // shorter writes are better combined by the page cache

// Returns the dimensions of a box by their strides in the file, widest first, so that a transposed tensor is also
// written in runs.
std::vector<int> by_stride(const Piece& piece) {
  std::vector<int> order(static_cast<std::size_t>(piece.box.rank()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return piece.strides[a] > piece.strides[b]; });
  return order;
}

Dims reordered(const Dims& dims, std::span<const int> order) {
  Dims out;
  for (const int d : order) out.push_back(dims[d]);
  return out;
}

// Writes a piece that may have gaps between its elements: calls `write` for each run along the innermost dimensions,
// with its offset in the piece's extent. `scratch` must hold the whole piece.
Status write_runs(const Piece& piece, Index element_bytes, const std::byte* data, const Dims& data_strides,
                  MutableBytes scratch, const std::function<Status(Index begin, Bytes run)>& write) {
  const int rank = piece.box.rank();
  const std::vector<int> order = by_stride(piece);
  const Dims shape = reordered(piece.box.shape, order), to_strides = reordered(piece.strides, order),
             packed_strides = row_major_strides(shape);
  copy_box(shape, element_bytes, data, reordered(data_strides, order), scratch.data(), packed_strides);
  const auto last = [&](const Dims& dims, int n) {
    return Dims(dims.span().subspan(static_cast<std::size_t>(rank - n)));
  };
  // Find the largest trailing part of the box that is one run in the file.
  int run_dims = 0;
  while (run_dims < rank && is_one_run(last(shape, run_dims + 1), last(to_strides, run_dims + 1))) ++run_dims;
  const int outer = rank - run_dims;
  const auto run_bytes = static_cast<std::size_t>(volume(last(shape, run_dims)) * element_bytes);
  Bytes rest = scratch;
  Dims at = Dims::filled(outer, 0);
  while (true) {
    Index to = 0;
    for (int d = 0; d < outer; ++d) to += at[d] * to_strides[d];
    TRY(write(piece.begin + to * element_bytes, rest.first(run_bytes)));
    rest = rest.subspan(run_bytes);
    int d = outer - 1;
    while (d >= 0 && ++at[d] == shape[d]) at[d--] = 0;
    if (d < 0) return {};
  }
}

// Returns the directories that contain the files, without the root. A directory precedes its subdirectories.
std::set<std::string> directories_of(const Catalog& catalog) {
  std::set<std::string> out;
  for (const CatalogFile& f : catalog.files)
    for (std::size_t at = f.path.find('/'); at != std::string::npos; at = f.path.find('/', at + 1))
      out.insert(f.path.substr(0, at));
  return out;
}

Error cannot_resume(const std::string& work, const std::string& why) {
  return usage_error(work + ": cannot resume: " + why + "; leave --resume require out to start over");
}

// Syncs files, several at a time if there are many: a file system's journal commits once for all that wait.
Status sync_files(FilePool& files, const std::vector<std::string>& paths) {
  constexpr Index kFilesOfAThread = 8, kThreads = 64;
  const Index n = std::ssize(paths);
  return parallel_for(
      n, static_cast<int>(std::min(kThreads, ceil_div(n, kFilesOfAThread))),
      [&](int, Index i) -> Status { return TRY(files.open(paths[static_cast<std::size_t>(i)]))->sync_data(); });
}

}  // namespace

Output::Output(OutputPath destination, Target& target, Transport* ranks, std::optional<ResumeOptions> resume_options)
    : to_(std::move(destination)),
      destination_(to_.path),
      work_(work_directory(destination_)),
      publishing_(publishing_directory(destination_)),
      target_(target),
      resume_options_(std::move(resume_options)),
      ranks_(ranks),
      crcs_(extents_of(target.catalog())),
      written_(target.catalog().files.size()),
      unsynced_(target.catalog().files.size()) {}

Output::~Output() {
  try {
    if (made_work_) (void)remove_work(work_);
    if (made_publishing_) (void)remove_work(publishing_);
  } catch (const std::bad_alloc&) {  // the next run removes it
  }
}

Result<std::unique_ptr<Output>> Output::create(OutputPath destination, Target& target, Space space, Transport* ranks,
                                               std::optional<ResumeOptions> resume_options) {
  destination.path = TRY(by_own_name(without_end_slashes(destination.path)));
  std::unique_ptr<Output> out(new Output(std::move(destination), target, ranks, std::move(resume_options)));
  if (rank_of(ranks) == 0) TRY(out->prepare(space));
  TRY(barrier(ranks));
  if (rank_of(ranks) > 0 && !TRY(path_exists(path_join(out->work_, kMarker))))
    return io_error(
        out->work_ +
        ": rank 0 created this directory, but this rank cannot see it; all ranks need the destination under the "
        "same path on a shared file system");
  if (out->resume_options_) out->make_journal();
  if (target.encoder()) out->make_chunks();
  return out;
}

Status Output::prepare(Space space) {
  for (const std::string& path : {destination_, work_, publishing_}) TRY(check_spares_inputs(path, to_.inputs));
  if (TRY(path_exists(destination_))) {
    if (!to_.files_of_checkpoint) return usage_error(destination_ + ": the destination exists; --force replaces it");
    old_ = TRY(replaceable(to_, destination_, target_));
  }
  TRY(take_leftover());
  if (earlier_work_) return {};
  lock_.emplace(TRY(make_work(work_)));
  made_work_ = true;
  for (const std::string& directory : directories_of(target_.catalog()))
    TRY(make_directory(path_join(work_, directory)));
  for (const CatalogFile& f : target_.catalog().files) {
    File file = TRY(File::create(path_join(work_, f.path)));
    // The length of encoded data is not known yet.
    if (!target_.encoder()) TRY(space == Space::kReserved ? file.allocate(f.size) : file.set_length(f.size));
    TRY(file.close());
  }
  return {};
}

// Resumes from the leftover of a killed run, or removes it.
Status Output::take_leftover() {
  const Resume resume = resume_options_ ? resume_options_->resume : Resume::kNever;
  if (TRY(path_exists(publishing_))) {
    const DirectoryLock lock = TRY(claim_work(publishing_));
    TRY(remove_work(publishing_));
  }
  if (!TRY(path_exists(work_))) {
    if (resume != Resume::kRequire) return {};
    return usage_error(work_ + ": nothing to resume; leave --resume require out to start from the beginning");
  }
  lock_.emplace(TRY(claim_work(work_)));
  std::string why;
  if (resume != Resume::kNever) {
    Leftover left = TRY(read_leftover(work_, target_, resume_options_->facts));
    earlier_work_ = std::move(left.finished);
    why = std::move(left.why_not);
    if (earlier_work_) {
      TRY(remove_what_is_not_data(work_, target_));
      journal_length_ = TRY(join_journals(work_, *earlier_work_));
      has_old_files_ = true;
      if (resume_options_->on_note)
        resume_options_->on_note("resuming " + work_ + ": " + human_bytes(earlier_work_->finished.bytes) +
                                 " already written; checking it first");
      return {};
    }
    if (resume == Resume::kRequire) return cannot_resume(work_, why);
  }
  TRY(remove_work(work_));
  lock_.reset();
  removed_leftover_ = true;
  if (resume_options_ && resume_options_->on_note)
    resume_options_->on_note("removed " + work_ + " of an interrupted run" +
                             (why.empty() ? "" : ", and started over: " + why));
  return {};
}

Status Output::start_over(const std::string& why) {
  if (rank_of(ranks_) == 0) {
    const bool is_required = resume_options_->resume == Resume::kRequire;
    earlier_work_.reset();  // and the directory stays
    if (is_required) return cannot_resume(work_, why);
    const File marker = TRY(File::open(path_join(work_, kMarker), File::Access::kReadWrite));
    TRY(marker.set_length(0));
    TRY(marker.sync_data());
    journal_length_ = 0;
    made_work_ = true;
    if (resume_options_->on_note) resume_options_->on_note("started over: " + why);
  }
  make_journal();
  return {};
}

void Output::make_journal() {
  const int rank = rank_of(ranks_);
  const std::string marker = path_join(work_, kMarker);
  journal_.reset();
  const auto open = [rank, marker] {
    return rank == 0 ? File::open(marker, File::Access::kReadWrite) : File::create(marker + "." + std::to_string(rank));
  };
  journal_ = std::make_unique<Journal>(open, journal_length_, resume_options_->facts, resume_options_->group_bytes,
                                       [this] { return sync_written(); });
}

// Syncs the data that this rank has written since the last call. Called by one thread at a time.
Status Output::sync_written() {
  std::vector<std::string> written;
  for (std::uint32_t f = 0; f < unsynced_.size(); ++f)
    if (unsynced_[f].exchange(false)) written.push_back(file_path(f));
  TRY(sync_files(files_, written));
  if (std::exchange(directories_synced_, true)) return {};
  for (const std::string& directory : directories_of(target_.catalog()))
    TRY(sync_directory(path_join(work_, directory)));
  TRY(sync_directory(work_));
  return sync_directory(parent_path(work_));
}

Error Output::give_up(const Error& error) {
  const bool may_pass = error.code() == ErrorCode::kIo || error.code() == ErrorCode::kPeer;
  const auto is_there = path_exists(path_join(work_, kMarker));
  if (!journal_ || (is_there.has_value() && !*is_there)) return error;
  // The next run would fail in the same way.
  if (!may_pass) {
    made_work_ = made_work_ || earlier_work_.has_value();
    return error;
  }
  const auto has_others = [&] {
    const auto others = journals_of_ranks(work_);
    return !others || !others->empty();  // what cannot be looked at is kept
  };
  const bool is_begun = earlier_work_ || journal_->bytes() > 0 || (rank_of(ranks_) == 0 && has_others());
  if (!is_begun) return error;
  (void)journal_->close_group();
  made_work_ = false;
  return {error.code(), error.message() + ". The finished part is kept in " + work_ +
                            ": rerun the same command to resume, or add --resume never to start over"};
}

Result<Index> Output::held_by_leftover(const std::string& destination) {
  const std::string own = TRY(by_own_name(without_end_slashes(destination)));
  Index sum = 0;
  for (const std::string& directory : {work_directory(own), publishing_directory(own)}) {
    if (!TRY(path_exists(path_join(directory, kMarker)))) continue;
    const std::vector<Node> inside = TRY(list_tree(directory));
    for (const Node& node : inside)
      if (node.is_regular()) sum += node.size;
  }
  return sum;
}

Status Output::read(const FragmentList& fragments, const FragmentIndex& index, const Box& box, Index element_bytes,
                    MutableBytes scratch, const VisitStored& visit) {
  for (const PieceGroup& group : pieces_of(fragments, index, box, element_bytes, static_cast<Index>(scratch.size()))) {
    const MutableBytes stored = scratch.first(static_cast<std::size_t>(group.length()));
    TRY(TRY(files_.open(file_path(group.extent.file)))->read_at(group.extent.offset + group.begin, stored));
    for (const Piece& piece : group.pieces) visit(piece, stored.data() + (piece.begin - group.begin));
  }
  return {};
}

std::string Output::file_path(std::uint32_t file) const { return path_join(work_, target_.catalog().files[file].path); }

// Writes the elements of one box, which are row-major in memory.
class Output::BoxWriter {
 public:
  BoxWriter(Output& output, const Box& box, Index element_bytes, Bytes data, MutableBytes scratch,
            std::vector<CrcPiece>* sums)
      : output_(output),
        box_(box),
        strides_(row_major_strides(box.shape)),
        element_bytes_(element_bytes),
        data_(data),
        scratch_(scratch),
        sums_(sums) {}

  // Returns the most bytes that a group may have.
  Index room() const { return std::ssize(scratch_) - File::kDirectUnit; }

  // Returns false if some data stays in memory until commit().
  Result<bool> write(std::span<const PieceGroup> groups) {
    while (!groups.empty()) {
      const PieceGroup& group = groups.front();
      Piece rows = group.pieces.front();
      std::size_t count = 1;
      if (has_gaps(group, element_bytes_)) {
        TRY(write_runs_of(group));
      } else if (is_one_run(group, strides_)) {
        TRY(write_bytes(group, {first_element(group.pieces.front()), static_cast<std::size_t>(group.length())},
                        scratch_));
      } else if (count = take_rows(groups, element_bytes_, room() / 2, rows); count > 1) {
        TRY(write_rows(groups.first(count), rows));
      } else {
        TRY(write_packed(group));
      }
      groups = groups.subspan(count);
    }
    return is_written_;
  }

 private:
  const std::byte* first_element(const Piece& piece) const {
    return data_.data() + offset_in(box_, strides_, piece.box) * element_bytes_;
  }

  void add_sum(const Extent& extent, Index begin, Bytes bytes) {
    if (!output_.target_.wants_crcs()) return;
    const CrcPiece sum{extent, begin, static_cast<Index>(bytes.size()), crc32(0, bytes)};
    output_.crcs_.add(sum.extent, sum.begin, sum.length, sum.crc);
    if (sums_ && sum.length > 0) sums_->push_back(sum);
  }

  // Writes the bytes of a group, or keeps them until commit(). `free` is the part of the scratch memory that does not
  // hold them.
  Status write_bytes(const PieceGroup& group, Bytes bytes, MutableBytes free) {
    const std::uint32_t file = group.extent.file;
    const Index offset = group.extent.offset + group.begin;
    if (output_.target_.encoder()) return output_.encode(offset, bytes);
    add_sum(group.extent, group.begin, bytes);
    if (std::ssize(data_) <= SmallWriteBuffer::kLongest && output_.held_.add(file, offset, bytes)) {
      is_written_ = false;
      return {};
    }
    TRY(output_.put(file, offset, bytes, free));
    output_.unsynced_[file] = true;
    return {};
  }

  // Writes the runs of a group one by one, because the bytes between them are not this box's.
  Status write_runs_of(const PieceGroup& group) {
    const Extent& extent = group.extent;
    std::shared_ptr<const File> file;
    if (!output_.target_.encoder()) file = TRY(output_.files_.open(output_.file_path(extent.file)));
    const auto write_run = [&](Index begin, Bytes run) -> Status {
      if (!file) return output_.encode(extent.offset + begin, run);
      add_sum(extent, begin, run);
      TRY(file->write_at(extent.offset + begin, run));
      output_.written_[extent.file] = output_.unsynced_[extent.file] = true;
      return {};
    };
    for (const Piece& p : group.pieces)
      TRY(write_runs(p, element_bytes_, first_element(p), strides_, scratch_, write_run));
    return {};
  }

  // Writes groups that take_rows() has joined to `rows`.
  Status write_rows(std::span<const PieceGroup> groups, const Piece& rows) {
    const auto length = static_cast<std::size_t>(groups.front().length());
    copy_box(rows.box.shape, element_bytes_, first_element(rows), strides_, scratch_.data(), rows.strides);
    const MutableBytes free = scratch_.subspan(groups.size() * length);
    for (std::size_t k = 0; k < groups.size(); ++k)
      TRY(write_bytes(groups[k], scratch_.subspan(k * length, length), free));
    return {};
  }

  // Packs the pieces of a group with the same offset within a page as in the file, so that whole pages can be written
  // directly.
  Status write_packed(const PieceGroup& group) {
    const auto shift = static_cast<std::size_t>((group.extent.offset + group.begin) % File::kDirectUnit);
    const MutableBytes packed = scratch_.subspan(shift, static_cast<std::size_t>(group.length()));
    for (const Piece& p : group.pieces)
      copy_box(p.box.shape, element_bytes_, first_element(p), strides_, packed.data() + (p.begin - group.begin),
               p.strides);
    return write_bytes(group, packed, scratch_);
  }

  Output& output_;
  const Box& box_;
  const Dims strides_;
  const Index element_bytes_;
  const Bytes data_;
  const MutableBytes scratch_;
  std::vector<CrcPiece>* const sums_;
  bool is_written_ = true;
};

Result<bool> Output::write(const FragmentList& fragments, const FragmentIndex& index, const Box& box,
                           Index element_bytes, Bytes data, MutableBytes scratch, std::vector<CrcPiece>* sums) {
  BoxWriter writer(*this, box, element_bytes, data, scratch, sums);
  return writer.write(pieces_of(fragments, index, box, element_bytes, writer.room()));
}

void Output::make_chunks() {
  const std::string spool = std::string(kMarker) + "-chunks." + std::to_string(rank_of(ranks_));
  chunks_ = std::make_unique<EncodedChunks>(*target_.encoder(), ranks_, path_join(work_, spool),
                                            [this](Index place, Bytes stored) { return put(0, place, stored, {}); });
}

Status Output::encode(Index offset, Bytes bytes) {
  return target_.encoder()->encode(
      offset, bytes, [&](const EncodedChunk& chunk, Bytes stored) { return chunks_->add(chunk, stored); });
}

// Writes the whole pages in `bytes` bypassing the page cache, and the rest through it.
Status Output::put(std::uint32_t f, Index offset, Bytes bytes, MutableBytes scratch) {
  constexpr Index kUnit = File::kDirectUnit;
  written_[f] = true;
  const auto length = static_cast<Index>(bytes.size());
  const Index head = std::min(length, ceil_div(offset, kUnit) * kUnit - offset);
  const Index pages = (length - head) / kUnit * kUnit;
  const auto buffered = TRY(files_.open(file_path(f)));
  const bool aligned = reinterpret_cast<std::uintptr_t>(bytes.data() + head) % kUnit == 0;
  const bool movable = aligned || pages <= static_cast<Index>(scratch.size());
  if (pages < kMinDirect || !direct_ || !movable) return buffered->write_at(offset, bytes);

  auto direct = direct_files_.open(file_path(f));
  if (!direct) {
    direct_ = false;
    return buffered->write_at(offset, bytes);
  }
  Bytes middle = bytes.subspan(static_cast<std::size_t>(head), static_cast<std::size_t>(pages));
  const Bytes tail = bytes.subspan(static_cast<std::size_t>(head + pages));
  TRY(buffered->write_at(offset, bytes.first(static_cast<std::size_t>(head))));
  TRY(buffered->write_at(offset + head + pages, tail));
  if (!aligned) {
    // Direct I/O needs aligned memory, so move the pages to the start of the scratch memory. They may be in it already.
    std::memmove(scratch.data(), middle.data(), middle.size());
    middle = scratch.first(middle.size());
  }
  if ((*direct)->write_at(offset + head, middle)) return {};
  // Direct I/O failed for whatever reason: fall back to buffered writes, whose errors count.
  direct_ = false;
  return buffered->write_at(offset + head, middle);
}

Status Output::add_file(const std::string& name, std::string_view contents) {
  if (SingleFile* const file = target_.single_file()) return file->add_side_file(name, contents);
  const std::string path = path_join(work_, name), directory = parent_path(path);
  if (!TRY(path_exists(directory))) TRY(make_directory(directory));
  File file = TRY(File::create(path));
  TRY(file.write_at(0, as_bytes(contents)));
  TRY(file.sync_data());
  TRY(file.close());
  return directory == work_ ? Status() : sync_directory(directory);
}

Status Output::add_text(const std::string& name, const std::function<void(const EmitText& emit)>& write_text) {
  constexpr std::size_t kStretch = std::size_t{1} << 20;
  std::string held;
  if (SingleFile* const file = target_.single_file()) {
    write_text([&](std::string_view part) { held += part; });
    return file->add_side_file(name, held);
  }
  File file = TRY(File::create(path_join(work_, name)));
  Status status;
  Index at = 0;
  const auto write_held = [&] {
    if (status) status = file.write_at(at, as_bytes(held));
    at += std::ssize(held);
    held.clear();
  };
  write_text([&](std::string_view part) {
    held += part;
    if (held.size() >= kStretch) write_held();
  });
  write_held();
  TRY(std::move(status));
  TRY(file.sync_data());
  return file.close();
}

Status Output::commit() {
  // After one of our own syncs has failed, no group may be closed.
  if (journal_) journal_->stop();
  if (rank_of(ranks_) > 0) {
    TRY(write_held());
    TRY(flush());
  }
  if (target_.wants_crcs()) TRY(crcs_.gather(ranks_));
  TRY(barrier(ranks_));  // every rank's data is on disk
  if (rank_of(ranks_) == 0) {
    TRY(seal());
    TRY(publish());
  }
  return barrier(ranks_);  // the output is published
}

Status Output::write_held() {
  JoinedWrites joined([this](std::uint32_t f, Index offset, Bytes bytes) { return put(f, offset, bytes, {}); });
  TRY(held_.give_all([&](std::uint32_t f, Index offset, Bytes bytes) { return joined.add(f, offset, bytes); }));
  return joined.finish();
}

// Syncs what this rank wrote: on a shared file system no other rank can.
Status Output::flush() {
  std::vector<std::string> written;
  for (std::uint32_t f = 0; f < written_.size(); ++f)
    if (written_[f]) written.push_back(file_path(f));
  return sync_files(files_, written);
}

// Writes what surrounds the data, and syncs everything.
Status Output::seal() {
  if (earlier_work_)
    for (const CrcPiece& p : earlier_work_->finished.written) crcs_.add(p.extent, p.begin, p.length, p.crc);
  std::string missing_crc;
  const PayloadCrc crc = [&](const Extent& e) -> std::uint32_t {
    if (e.length == 0) return 0;
    const auto whole = crcs_.whole(e);
    if (!whole) missing_crc = at(target_.catalog().files[e.file].path, e.offset);
    return whole.value_or(0);
  };
  std::shared_ptr<const File> last;  // the last file written to
  std::uint32_t last_number = 0;
  const auto write = [&](std::uint32_t f, Index offset, Bytes bytes) -> Status {
    if (!last || f != last_number) last = TRY(files_.open(file_path(f)));
    last_number = f;
    return last->write_at(offset, bytes);
  };
  std::optional<FileGaps> gaps;
  if (has_old_files_) gaps.emplace(target_.catalog());
  // Adjacent items become one write.
  JoinedWrites joined(write);
  const EmitBytes emit = [&](std::uint32_t f, Index offset, Bytes bytes) { return joined.add(f, offset, bytes); };
  TRY(target_.seal(crc, [&](std::uint32_t f, Index offset, Bytes bytes) -> Status {
    TRY(held_.give_before(f, offset, emit));
    if (gaps) gaps->add_written(f, offset, std::ssize(bytes));
    return emit(f, offset, bytes);
  }));
  TRY(held_.give_all(emit));
  TRY(joined.finish());
  if (!missing_crc.empty()) return internal_error(missing_crc + ": the data was not written completely");
  std::vector<std::string> all;
  for (std::uint32_t f = 0; f < target_.catalog().files.size(); ++f) {
    all.push_back(file_path(f));
    if (target_.sealed_size(f) != target_.catalog().files[f].size || target_.encoder())
      TRY(TRY(files_.open(all.back()))->set_length(target_.sealed_size(f)));
  }
  if (gaps) TRY(clear_gaps(*gaps));
  TRY(sync_files(files_, all));
  for (const std::string& directory : directories_of(target_.catalog()))
    TRY(sync_directory(path_join(work_, directory)));
  return sync_directory(work_);
}

// Writes zeros where nothing else is written.
Status Output::clear_gaps(FileGaps& gaps) {
  static constexpr std::array<std::byte, std::size_t{64} << 10> kZeros{};
  return gaps.visit([&](std::uint32_t f) { return target_.sealed_size(f); },
                    [&](const Extent& gap) -> Status {
                      const auto file = TRY(files_.open(file_path(gap.file)));
                      for (Index done = 0; done < gap.length; done += std::ssize(kZeros)) {
                        const Index n = std::min(std::ssize(kZeros), gap.length - done);
                        TRY(file->write_at(gap.offset + done, Bytes(kZeros).first(static_cast<std::size_t>(n))));
                      }
                      return {};
                    });
}

// Moves the finished output to the destination. Returns whether `made` now is the old destination that create() saw.
// Anything else that has appeared at the destination stays there or is put back.
Result<bool> Output::take_place(const std::string& made) {
  if (!old_ || !TRY(path_exists(destination_))) {
    const Status moved = rename_no_replace(made, destination_);
    if (moved) return false;
    return TRY(path_exists(destination_)) ? keep_finished(made, moved.error()) : moved.error();
  }
  const Error changed = io_error(destination_ + ": changed while this job ran, so it was not replaced");
  const auto is_old = [&](const std::string& path) -> Result<bool> { return TRY(look_at_old(path)) == *old_; };
  if (!TRY(is_old(destination_))) return keep_finished(made, changed);
  TRY(exchange_paths(made, destination_));
  const Result<bool> is_replaced = is_old(made);
  if (is_replaced.has_value() && *is_replaced) return true;
  if (!is_replaced.has_value() && exchange_paths(made, destination_)) return is_replaced.error();
  // What appeared in between is neither ours nor the next run's to remove.
  made_work_ = made_publishing_ = false;
  (void)remove_markers(marked_directory());
  TRY(exchange_paths(made, destination_)
          .context("the output is complete at " + destination_ + "; what appeared there meanwhile is at " + made));
  return keep_finished(made, changed);
}

// Returns the error of an output that is complete but cannot be published, and leaves the output to the user: in the
// work directory, without a marker.
Error Output::keep_finished(const std::string& made, const Error& error) {
  if (!remove_markers(marked_directory())) return error;
  made_work_ = made_publishing_ = false;
  if (!target_.single_file() && (!rename_no_replace(made, work_) || !remove_directory(publishing_)))
    return {error.code(), error.message() + ". The finished output is at " + made + "; move it to its destination"};
  return {error.code(), error.message() + ". The finished output is at " + (target_.single_file() ? made : work_) +
                            "; move it to its destination"};
}

// Removes the replaced destination, which is now where the output was made: only the files that create() saw.
Status Output::remove_old(const std::string& made) {
  const auto remove = [](const Node& node, const std::string& path) {
    return node.is_directory() ? remove_directory(path) : remove_file(path);
  };
  for (auto node = old_->inside.rbegin(); node != old_->inside.rend(); ++node)
    TRY(remove(*node, path_join(made, node->name)));
  // An earlier version of reshard may have left its marker there when it was killed.
  if (old_->self.is_directory()) TRY(remove_markers(made));
  return remove(old_->self, made);
}

// Moves the finished directory into one that has the marker next to it. The order of the syncs allows for a power cut
// at any time: until the move is durable the output needs its own marker, and a published directory must not have one.
Status Output::move_aside(const std::string& made) {
  publishing_lock_.emplace(TRY(make_work(publishing_)));
  made_publishing_ = true;
  TRY(rename_no_replace(work_, made));
  made_work_ = false;
  TRY(sync_directory(parent_path(work_)));
  TRY(remove_markers(made));
  return sync_directory(made);
}

// Moves the finished directory or file to the destination. If that cannot be made durable it is undone: after an error
// the destination is what it was before.
Status Output::publish() {
  const std::string made = target_.single_file() ? file_path(0) : path_join(publishing_, "output");
  if (!target_.single_file()) TRY(move_aside(made));
  const bool replaces = TRY(take_place(made));
  Status lasting = sync_directory(parent_path(destination_));
  if (lasting) {
    made_work_ = made_publishing_ = false;
    const std::string complete = "the new checkpoint is complete in " + destination_;
    if (replaces) TRY(remove_old(made).context(complete + ", but the old one could not be removed"));
    return remove_work(marked_directory()).context(complete + ", but its work directory could not be removed");
  }
  if (replaces ? exchange_paths(made, destination_) : rename_no_replace(destination_, made)) return lasting;
  made_work_ = made_publishing_ = false;
  return std::move(lasting).context(destination_ +
                                    ": the output is complete, but may not survive a power cut, and could not be "
                                    "taken back");
}

}  // namespace reshard
