#include "lib/engine/output.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <set>
#include <span>
#include <utility>

#include "lib/base/names.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"
#include "lib/device/copy.h"
#include "lib/device/crc32.h"
#include "lib/engine/pieces.h"
#include "lib/engine/work_directory.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr Index kMinDirect = Index{128} << 10;  // shorter writes are better gathered by the page cache

// The dimensions of a box by their strides in the file, the widest first: a transposed tensor is written in runs too.
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

// Hands on a piece that may leave gaps between its elements: run by run along the innermost dimensions, with the place
// of each in the piece's extent. `scratch` holds the piece.
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
  // The largest trailing part of the box that is one run in the file.
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

// The directories that the files lie in, a parent before what is in it; not the root.
std::set<std::string> directories_of(const Catalog& catalog) {
  std::set<std::string> out;
  for (const CatalogFile& f : catalog.files)
    for (std::size_t at = f.path.find('/'); at != std::string::npos; at = f.path.find('/', at + 1))
      out.insert(f.path.substr(0, at));
  return out;
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

// Forces files to disk; many of them several at a time, as a file system's journal writes once what many wait for.
Status sync_files(FilePool& files, const std::vector<std::string>& paths) {
  constexpr Index kFilesOfAThread = 8, kThreads = 64;
  const Index n = std::ssize(paths);
  return parallel_for(
      n, static_cast<int>(std::min(kThreads, ceil_div(n, kFilesOfAThread))),
      [&](int, Index i) -> Status { return TRY(files.open(paths[static_cast<std::size_t>(i)]))->sync_data(); });
}

}  // namespace

Output::Output(OutputPath destination, Target& target, Transport* ranks, std::optional<Continuation> continuation)
    : to_(std::move(destination)),
      destination_(by_own_name(without_slash(to_.path))),
      work_(destination_ + ".partial"),
      target_(target),
      continuation_(std::move(continuation)),
      ranks_(ranks),
      crcs_(extents_of(target.catalog())),
      written_(target.catalog().files.size()),
      unsynced_(target.catalog().files.size()) {}

Output::~Output() {
  try {
    if (made_work_) (void)remove_work(work_);
  } catch (const std::bad_alloc&) {  // the next run removes it
  }
  if (lock_ >= 0) ::close(lock_);
}

Result<std::unique_ptr<Output>> Output::create(OutputPath destination, Target& target, Space space, Transport* ranks,
                                               std::optional<Continuation> continuation) {
  std::unique_ptr<Output> out(new Output(std::move(destination), target, ranks, std::move(continuation)));
  if (rank_of(ranks) == 0) TRY(out->prepare(space));
  TRY(barrier(ranks));
  if (rank_of(ranks) > 0 && !path_exists(path_join(out->work_, kMarker)))
    return io_error(out->work_ +
                    ": rank 0 made it, but it is not to be seen from here: all ranks need the destination under the "
                    "same path, on a file system that they share");
  if (out->continuation_) out->make_journal();
  if (target.encodes()) out->make_chunks();
  return out;
}

Status Output::prepare(Space space) {
  if (path_exists(destination_)) {
    if (!to_.files_of_checkpoint) return usage_error(destination_ + ": the destination exists; --force replaces it");
    old_ = TRY(replaceable(to_, destination_, target_));
  }
  TRY(take_leftover());
  if (continued_) return {};
  TRY(make_directory(work_));
  made_work_ = true;
  lock_ = ::open(work_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock_ < 0 || ::flock(lock_, LOCK_EX | LOCK_NB) != 0)
    return io_error(work_ + ": cannot lock: " + std::strerror(errno));
  TRY(File::create(path_join(work_, kMarker)));
  TRY(sync_directory(work_));  // before there is anything else in it
  for (const std::string& directory : directories_of(target_.catalog()))
    TRY(make_directory(path_join(work_, directory)));
  for (const CatalogFile& f : target_.catalog().files) {
    File file = TRY(File::create(path_join(work_, f.path)));
    // How long encoded data will be nobody knows yet.
    if (!target_.encodes()) TRY(space == Space::kReserved ? file.allocate(f.size) : file.set_length(f.size));
    TRY(file.close());
  }
  return {};
}

// What a killed run has left in the work directory is continued, or removed.
Status Output::take_leftover() {
  const Resume resume = continuation_ ? continuation_->resume : Resume::kNever;
  if (!path_exists(work_)) {
    if (resume != Resume::kRequire) return {};
    return usage_error(work_ + ": there is nothing to continue; without --resume require a run begins anew");
  }
  const int fd = ::open(work_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0)
    return io_error(work_ + ": is in the way and " +
                    (errno == ENOTDIR || errno == ELOOP ? "is not a directory"
                                                        : "cannot be opened: " + std::string(std::strerror(errno))));
  lock_ = fd;
  const bool free = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
  // A run may have been killed before it made the marker; an empty directory is nobody's loss.
  const bool ours = path_exists(path_join(work_, kMarker)) || TRY(walk(work_)).empty();
  if (!ours) return usage_error(work_ + ": is in the way and was not made by reshard; move it elsewhere");
  if (!free) return usage_error(work_ + ": another reshard is writing there now");
  TRY(check_holds_no_input(to_, work_));
  std::string why;
  if (resume != Resume::kNever) {
    Leftover left = TRY(read_leftover(work_, target_, continuation_->facts));
    continued_ = std::move(left.finished);
    why = std::move(left.why_not);
    if (continued_) {
      TRY(remove_what_is_not_data(work_, target_));
      journal_length_ = TRY(join_journals(work_, *continued_));
      if (continuation_->tell)
        continuation_->tell("continues " + work_ +
                            ", left by a killed run: " + human_bytes(continued_->finished.bytes) + " are done");
      return {};
    }
    if (resume == Resume::kRequire)
      return usage_error(work_ + ": cannot be continued: " + why + "; without --resume require it is begun anew");
  }
  ::close(std::exchange(lock_, -1));
  TRY(remove_work(work_));
  removed_leftover_ = true;
  if (continuation_ && continuation_->tell)
    continuation_->tell("removed " + work_ + ", left by a killed run" +
                        (why.empty() ? "" : ", and began anew: " + why));
  return {};
}

// Of the ranks of this job; what is left is only the marker.
Status Output::remove_journals(const std::string& directory) const {
  for (int r = 1; journal_ && r < rank_count(ranks_); ++r)
    if (const std::string path = path_join(directory, std::string(kMarker) + "." + std::to_string(r));
        path_exists(path))
      TRY(remove_file(path));
  return {};
}

void Output::make_journal() {
  const int rank = rank_of(ranks_);
  const std::string marker = path_join(work_, kMarker);
  const auto open = [rank, marker] {
    return rank == 0 ? File::open(marker, File::Access::kReadWrite) : File::create(marker + "." + std::to_string(rank));
  };
  journal_ = std::make_unique<Journal>(open, journal_length_, continuation_->facts, continuation_->group_bytes,
                                       [this] { return sync_written(); });
}

// Forces to disk what this rank has written since it last did; by one thread at a time.
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
  const bool is_there = path_exists(path_join(work_, kMarker));
  if (!journal_ || !is_there) return error;
  // The next run would meet it again.
  if (!may_pass) {
    made_work_ = made_work_ || continued_.has_value();
    return error;
  }
  const bool is_begun =
      continued_ || journal_->bytes() > 0 || (rank_of(ranks_) == 0 && !journals_of_ranks(work_).empty());
  if (!is_begun) return error;
  (void)journal_->close_group();
  made_work_ = false;
  return {error.code(), error.message() + ". What is finished stays in " + work_ +
                            ": the same command goes on from there (--resume never begins anew)"};
}

Index Output::held_by_leftover(const std::string& destination) {
  const std::string work = without_slash(destination) + ".partial";
  Index sum = 0;
  const auto inside =
      path_exists(path_join(work, kMarker)) ? walk(work) : Result<std::vector<Node>>(std::vector<Node>());
  for (std::size_t i = 0; inside && i < inside->size(); ++i)
    if ((*inside)[i].is_regular()) sum += (*inside)[i].size;
  return sum;
}

std::string Output::file_path(std::uint32_t file) const { return path_join(work_, target_.catalog().files[file].path); }

Result<bool> Output::write(const FragmentList& fragments, const FragmentIndex& index, const Box& box,
                           Index element_bytes, Bytes data, MutableBytes scratch, std::vector<CrcPiece>* sums) {
  const auto add_sum = [&](const Extent& extent, Index begin, Bytes bytes) {
    if (!target_.wants_crcs()) return;
    const CrcPiece sum{extent, begin, static_cast<Index>(bytes.size()), crc32(0, bytes)};
    crcs_.add(sum.extent, sum.begin, sum.length, sum.crc);
    if (sums && sum.length > 0) sums->push_back(sum);
  };
  const Dims data_strides = row_major_strides(box.shape);
  bool is_written = true;
  for (const PieceGroup& group :
       pieces_of(fragments, index, box, element_bytes, static_cast<Index>(scratch.size()) - File::kDirectUnit)) {
    const auto place = [&](const Piece& p) {
      return data.data() + offset_in(box, data_strides, p.box) * element_bytes;
    };
    Index held = 0;
    for (const Piece& p : group.pieces) held += volume(p.box) * element_bytes;
    if (held != group.length()) {
      const auto file = TRY(files_.open(file_path(group.extent.file)));
      const auto write_run = [&](Index begin, Bytes run) -> Status {
        if (target_.encodes()) return encode(group.extent.offset + begin, run);
        add_sum(group.extent, begin, run);
        TRY(file->write_at(group.extent.offset + begin, run));
        written_[group.extent.file] = unsynced_[group.extent.file] = true;
        return {};
      };
      for (const Piece& p : group.pieces) TRY(write_runs(p, element_bytes, place(p), data_strides, scratch, write_run));
      continue;
    }
    const Piece& first = group.pieces.front();
    const auto length = static_cast<std::size_t>(group.length());
    const bool direct = group.pieces.size() == 1 && is_one_run(first.box.shape, first.strides) &&
                        is_one_run(first.box.shape, data_strides);
    // Packed at the same distance from a page's start as in the file, so that whole pages can be written directly.
    const auto shift = static_cast<std::size_t>((group.extent.offset + group.begin) % File::kDirectUnit);
    const MutableBytes packed = scratch.subspan(shift, length);
    Bytes bytes(place(first), length);
    if (!direct) {
      for (const Piece& p : group.pieces)
        copy_box(p.box.shape, element_bytes, place(p), data_strides, packed.data() + (p.begin - group.begin),
                 p.strides);
      bytes = packed;
    }
    if (target_.encodes()) {
      TRY(encode(group.extent.offset + group.begin, bytes));
      continue;
    }
    add_sum(group.extent, group.begin, bytes);
    const Index offset = group.extent.offset + group.begin;
    if (std::ssize(data) <= HeldWrites::kLongest && held_.add(group.extent.file, offset, bytes)) {
      is_written = false;
      continue;
    }
    TRY(put(group.extent.file, offset, bytes, scratch));
    unsynced_[group.extent.file] = true;
  }
  return is_written;
}

void Output::make_chunks() {
  const std::string spool = std::string(kMarker) + "-chunks." + std::to_string(rank_of(ranks_));
  chunks_ = std::make_unique<EncodedChunks>(target_, ranks_, path_join(work_, spool),
                                            [this](Index place, Bytes stored) { return put(0, place, stored, {}); });
}

Status Output::encode(Index offset, Bytes bytes) {
  return target_.encode(offset, bytes,
                        [&](const EncodedChunk& chunk, Bytes stored) { return chunks_->add(chunk, stored); });
}

// Writes the pages that `bytes` fill past the page cache, and the rest of it through it.
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
    // Moves the pages to the start of the scratch memory, which is aligned; they may lie in it already.
    std::memmove(scratch.data(), middle.data(), middle.size());
    middle = scratch.first(middle.size());
  }
  if ((*direct)->write_at(offset + head, middle)) return {};
  // Whatever it was that the direct way did not like: the ordinary one decides.
  direct_ = false;
  return buffered->write_at(offset + head, middle);
}

Status Output::add_file(const std::string& name, std::string_view contents) {
  if (target_.is_file()) return target_.add_side_file(name, contents);
  const std::string path = path_join(work_, name), directory = parent_path(path);
  if (!path_exists(directory)) TRY(make_directory(directory));
  File file = TRY(File::create(path));
  TRY(file.write_at(0, as_bytes(contents)));
  TRY(file.sync_data());
  TRY(file.close());
  return directory == work_ ? Status() : sync_directory(directory);
}

Status Output::add_text(const std::string& name, const std::function<void(const EmitText& emit)>& tell) {
  constexpr std::size_t kStretch = std::size_t{1} << 20;
  std::string held;
  if (target_.is_file()) {
    tell([&](std::string_view part) { held += part; });
    return target_.add_side_file(name, held);
  }
  File file = TRY(File::create(path_join(work_, name)));
  Status status;
  Index at = 0;
  const auto write_held = [&] {
    if (status) status = file.write_at(at, as_bytes(held));
    at += std::ssize(held);
    held.clear();
  };
  tell([&](std::string_view part) {
    held += part;
    if (held.size() >= kStretch) write_held();
  });
  write_held();
  TRY(std::move(status));
  TRY(file.sync_data());
  return file.close();
}

Status Output::commit() {
  // A group that was begun may not be closed once a sync of ours has failed.
  if (journal_) journal_->stop();
  if (rank_of(ranks_) > 0) {
    TRY(write_held());
    TRY(flush());
  }
  if (target_.wants_crcs())
    TRY(stream_values<CrcPiece>(
        ranks_, [&](const VisitPiece& visit) { crcs_.tell_everything(visit); },
        [&](const CrcPiece& p) { crcs_.add(p.extent, p.begin, p.length, p.crc); }));
  TRY(barrier(ranks_));  // every rank's data are on disk
  if (rank_of(ranks_) == 0) {
    TRY(seal());
    TRY(target_.is_file() ? publish_file() : publish());
  }
  return barrier(ranks_);  // the output is there
}

Status Output::write_held() {
  JoinedWrites joined([this](std::uint32_t f, Index offset, Bytes bytes) { return put(f, offset, bytes, {}); });
  TRY(held_.give_all([&](std::uint32_t f, Index offset, Bytes bytes) { return joined.add(f, offset, bytes); }));
  return joined.finish();
}

// Forces to disk what this rank wrote: on a shared file system nobody else can.
Status Output::flush() {
  std::vector<std::string> written;
  for (std::uint32_t f = 0; f < written_.size(); ++f)
    if (written_[f]) written.push_back(file_path(f));
  return sync_files(files_, written);
}

// Writes what surrounds the data, and forces everything to disk.
Status Output::seal() {
  if (continued_)
    for (const CrcPiece& p : continued_->finished.written) crcs_.add(p.extent, p.begin, p.length, p.crc);
  std::string missing_crc;
  const PayloadCrc crc = [&](const Extent& e) -> std::uint32_t {
    if (e.length == 0) return 0;
    const auto whole = crcs_.whole(e);
    if (!whole) missing_crc = at(target_.catalog().files[e.file].path, e.offset);
    return whole.value_or(0);
  };
  std::shared_ptr<const File> last;  // that was written to
  std::uint32_t last_number = 0;
  const auto write = [&](std::uint32_t f, Index offset, Bytes bytes) -> Status {
    if (!last || f != last_number) last = TRY(files_.open(file_path(f)));
    last_number = f;
    return last->write_at(offset, bytes);
  };
  // Where one item ends another begins.
  JoinedWrites joined(write);
  const EmitBytes emit = [&](std::uint32_t f, Index offset, Bytes bytes) { return joined.add(f, offset, bytes); };
  TRY(target_.seal(crc, [&](std::uint32_t f, Index offset, Bytes bytes) -> Status {
    TRY(held_.give_before(f, offset, emit));
    return emit(f, offset, bytes);
  }));
  TRY(held_.give_all(emit));
  TRY(joined.finish());
  if (!missing_crc.empty()) return internal_error(missing_crc + ": was not written completely");
  std::vector<std::string> all;
  for (std::uint32_t f = 0; f < target_.catalog().files.size(); ++f) {
    all.push_back(file_path(f));
    if (target_.sealed_size(f) != target_.catalog().files[f].size || target_.encodes())
      TRY(TRY(files_.open(all.back()))->set_length(target_.sealed_size(f)));
  }
  TRY(sync_files(files_, all));
  for (const std::string& directory : directories_of(target_.catalog()))
    TRY(sync_directory(path_join(work_, directory)));
  return sync_directory(work_);
}

// Moves what was made to the destination's name. True: what was there, the old one that create() saw, is now where
// that was. Anything else that has come to stand there stays, or comes back.
Result<bool> Output::take_place(const std::string& made) {
  if (!old_ || !path_exists(destination_)) {
    const Status moved = rename_no_replace(made, destination_);
    if (moved) return false;
    return path_exists(destination_) ? keep_finished(moved.error()) : moved.error();
  }
  const Error changed = io_error(destination_ + ": was changed while this job ran, and is left as it is");
  const auto is_old = [&](const std::string& path) -> Result<bool> { return TRY(look_at_old(path)) == *old_; };
  if (!TRY(is_old(destination_))) return keep_finished(changed);
  // A directory is about to become the work directory, and must be known as such if this run is killed.
  const std::string marker = path_join(destination_, kMarker);
  if (!target_.is_file() && !path_exists(marker)) TRY(File::create(marker));
  const Status known = target_.is_file() ? Status() : sync_directory(destination_);
  if (!known) {
    (void)remove_file(marker);
    return known.error();
  }
  if (Status swapped = exchange_paths(made, destination_); !swapped) {
    if (!target_.is_file()) (void)remove_file(marker);
    return swapped.error();
  }
  const Result<bool> is_replaced = is_old(made);
  if (is_replaced && *is_replaced) return true;
  if (!is_replaced && exchange_paths(made, destination_)) {
    if (!target_.is_file()) (void)remove_file(marker);
    return is_replaced.error();
  }
  made_work_ = false;  // what came in between is not ours
  if (!target_.is_file()) (void)remove_file(path_join(made, kMarker));
  TRY(exchange_paths(made, destination_)
          .context("the output is complete in " + destination_ + ", what came there meanwhile is " + made));
  return keep_finished(changed);
}

// The error of an output that is complete but cannot have its name. It stays in the work directory, which is no longer
// ours to clear away.
Error Output::keep_finished(const Error& error) {
  if (!remove_journals(work_) || !remove_file(path_join(work_, kMarker))) return error;
  made_work_ = false;
  return {error.code(), error.message() + ". The finished output is " + (target_.is_file() ? file_path(0) : work_) +
                            ": move it to where it is wanted"};
}

// Removes what was replaced, which has the work directory's name: the files that create() saw, and no others. The
// marker goes last.
Status Output::remove_old() {
  made_work_ = false;
  for (auto node = old_->inside.rbegin(); node != old_->inside.rend(); ++node) {
    const std::string path = path_join(work_, node->name);
    TRY(node->is_directory() ? remove_directory(path) : remove_file(path));
  }
  for (const std::string& name : journals_of_ranks(work_)) TRY(remove_file(path_join(work_, name)));
  return remove_marked(work_);
}

// Moves the finished file to its name; a file it replaces takes its place in the work directory, which is known as ours
// all the while.
Status Output::publish_file() {
  const std::string made = file_path(0);
  const bool replaces = TRY(take_place(made));
  Status lasting = sync_directory(parent_path(destination_));
  if (lasting) {
    made_work_ = false;
    return remove_work(work_).context("the new checkpoint is complete in " + destination_ +
                                      ", but its work directory could not be removed");
  }
  if (replaces ? exchange_paths(made, destination_) : rename_no_replace(destination_, made)) return lasting;
  made_work_ = false;
  return std::move(lasting).context(destination_ +
                                    ": the output is complete, but may not survive a power cut, and could not be "
                                    "taken back");
}

// Moves the finished directory to its name. When that cannot be made lasting it is taken back: after an error the
// destination is what it was before.
Status Output::publish() {
  const std::string marker = path_join(destination_, kMarker);
  const bool replaces = TRY(take_place(work_));
  // The marker only now: a leftover without one could not be told from somebody else's directory.
  Status lasting = sync_directory(parent_path(destination_));
  if (lasting) lasting = remove_journals(destination_);
  if (lasting) lasting = remove_file(marker);
  if (lasting) {
    made_work_ = false;
    if (!replaces) return {};
    return remove_old().context("the new checkpoint is complete in " + destination_ +
                                ", but the old one could not be removed");
  }
  const Status back = replaces ? exchange_paths(work_, destination_) : rename_no_replace(destination_, work_);
  if (back) {
    if (replaces) (void)remove_file(marker);
    return lasting;
  }
  made_work_ = false;
  return std::move(lasting).context(destination_ +
                                    ": the output is complete, but may not survive a power cut, and "
                                    "could not be taken back");
}

}  // namespace reshard
