// SPDX-License-Identifier: Apache-2.0
#include "lib/output/upload.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "lib/base/json.h"
#include "lib/base/names.h"
#include "lib/base/parallel.h"
#include "lib/base/shell.h"
#include "lib/base/storage/http.h"
#include "lib/base/storage/sha256.h"
#include "lib/base/storage/storage.h"
#include "lib/base/text.h"
#include "lib/output/work_directory.h"
#include "lib/transport/collectives.h"
#include "lib/transport/waiting.h"

namespace reshard {
namespace {

constexpr Index kUsualPart = Index{8} << 20;
constexpr Index kStep = Index{1} << 20;
constexpr Index kMostJournal = Index{256} << 20;
constexpr int kRequestsAtOnce = 16;  // of those without data

Error upload_not_resumable(const std::string& what, const std::string& why) {
  return usage_error(what + ": cannot be resumed: " + why + "; leave --resume require out to start over");
}

// Returns the size of parts with which a file of this size needs at most kMostParts.
Index part_bytes_for(Index largest_file) {
  return std::max(kUsualPart, ceil_div(ceil_div(largest_file, kMostParts), kStep) * kStep);
}

// Fetches ahead the parts of a source that will be computed next.
class PartsAhead {
 public:
  PartsAhead(const Upload::Source& source, int ahead) : source_(source), ahead_(ahead) {}

  // Call before part `i` is computed. `range` returns file, offset and length of a part.
  template <class Range>
  void begin(Index i, Index parts, Range range) {
    if (!source_.expect) return;
    const std::lock_guard lock(mutex_);
    std::vector<FileRange> ranges;
    for (; next_ < std::min(parts, i + ahead_ + 1); ++next_) {
      const auto [file, offset, length] = range(next_);
      source_.expect(file, offset, length, ranges);
    }
    if (!ranges.empty()) fetched_.fetch(ranges);
  }

 private:
  const Upload::Source& source_;
  const Index ahead_;
  std::mutex mutex_;
  Index next_ = 0;
  ReadAhead fetched_;
};

}  // namespace

Index Upload::part_bytes(const std::vector<UploadFile>& files) {
  Index largest = 0;
  for (const UploadFile& file : files) largest = std::max(largest, file.size);
  return part_bytes_for(largest);
}

Index Upload::part_bytes(const Catalog& output) {
  Index largest = 0;
  for (const CatalogFile& file : output.files) largest = std::max(largest, file.size);
  return part_bytes_for(largest);
}

Upload::Memory Upload::plan_memory(Index left, Index part_bytes, bool reads_ahead) {
  constexpr Index kMostWorkers = 16, kConnection = Index{1} << 20;
  const Index each = (reads_ahead ? 2 : 1) * part_bytes + kConnection;
  const Index workers = std::clamp<Index>(left * 3 / 8 / each, 1, kMostWorkers);
  return {static_cast<int>(workers), workers * each};
}

Upload::Upload(OutputPath to, std::vector<UploadFile> files, Options options, ObjectWriter& writer)
    : to_(std::move(to)),
      url_(parse_url(to_.path)),
      files_(std::move(files)),
      options_(std::move(options)),
      writer_(writer),
      part_bytes_(part_bytes(files_)),
      uploads_(files_.size()),
      etags_(files_.size()),
      begins_(1) {
  for (const UploadFile& file : files_) begins_.push_back(begins_.back() + (file.holds_tensors ? file.size : 0));
}

Upload::~Upload() {
  if (is_begun_ && !is_kept_) (void)abort_all();
}

std::string Upload::key_of(const UploadFile& file) const {
  return file.path.empty() ? url_.key : url_.key + "/" + file.path;
}

// Returns the journal's path: a URL, or a local file whose name depends on the destination.
std::string Upload::journal_path() const {
  if (to_.state.empty()) return work_directory(to_.path) + "/" + std::string(kMarker);
  constexpr std::size_t kDigits = 16;
  return path_join(to_.state, "reshard-" + to_hex(sha256(to_.path)).substr(0, kDigits) + std::string(kMarker));
}

// Returns what messages name as the place of an unfinished output.
std::string Upload::uploads_place() const { return to_.state.empty() ? work_directory(to_.path) : journal_path(); }

Status Upload::remove_journal() {
  const std::string path = journal_path();
  if (is_url(path)) return writer_.remove(parse_url(path).key);
  return TRY(path_exists(path)) ? remove_file(path) : Status();
}

Result<std::unique_ptr<Upload>> Upload::create(OutputPath to, std::vector<UploadFile> files, Options options) {
  const Url url = parse_url(to.path);
  if (url.key.empty())
    return usage_error(to.path + ": expected a directory in the bucket, as in " + url.root + "/directory");
  to.path = url.root + "/" + url.key;
  ObjectWriter* const writer = TRY(StoredTree::of(url))->storage().writer();
  if (!writer) return usage_error(to.path + ": cannot be written to; expected s3:// or gs://");
  for (const UploadFile& file : files)
    if (file.size > kLargestObject)
      return unsupported(to.path + "/" + file.path + ": " + human_bytes(file.size) +
                         " is more than the largest object of a bucket, 5 TiB; use more files (--mesh, "
                         "--max-shard-size)");
  const bool is_first = rank_of(options.ranks) == 0;
  std::unique_ptr<Upload> out(new Upload(std::move(to), std::move(files), std::move(options), *writer));
  if (is_first) TRY(out->prepare());
  if (const Status shared = out->share_uploads(); !shared) return out->give_up(shared.error());
  return out;
}

Status Upload::prepare() {
  const std::string work = uploads_place();
  if (!to_.state.empty() && !TRY(path_exists(to_.state))) TRY(make_directory(to_.state));
  forget_stored(to_.path);
  forget_stored(work_directory(to_.path));
  const std::optional<Journal> left = TRY(read_journal());
  TRY(look_at_destination(left));
  const Resume resume = options_.resume;
  if (!left && resume == Resume::kRequire)
    return usage_error(work + ": nothing to resume; leave --resume require out to start from the beginning");
  if (left) {
    const std::string why = resume == Resume::kNever ? "" : TRY(why_not(*left));
    if (resume == Resume::kRequire && !why.empty()) return upload_not_resumable(work, why);
    if (resume != Resume::kNever && why.empty()) {
      TRY(take_up(*left));
    } else {
      TRY(drop(*left));
      if (options_.on_note)
        options_.on_note("removed " + work + " of an interrupted run" +
                         (why.empty() ? "" : ", and started over: " + why));
    }
  }
  if (const Status begun = begin(); !begun) return give_up(begun.error());
  return {};
}

// ---- what is there

Result<std::optional<Upload::Journal>> Upload::read_journal() const {
  const std::string path = journal_path();
  if (!TRY(entry_at(path))) return std::optional<Journal>();
  const Json json = TRY(parse_json(TRY(read_whole_file(path, kMostJournal)), path));
  const auto damaged = [&](const Error& error) {
    return usage_error(path + ": is not a journal of reshard (" + error.message() + "); remove it to start over");
  };
  const auto read = [&]() -> Result<Journal> {
    Journal out;
    out.facts = TRY(json.get_string("facts"));
    out.part_bytes = TRY(json.get_index("part_bytes"));
    out.is_publishing = TRY(json.get_bool("publishing"));
    for (const Json& name : TRY(json.get_array("replaced"))) out.replaced.emplace_back(TRY(name.as_string()));
    for (const Json& file : TRY(json.get_array("files"))) {
      const Index size = TRY(file.get_index("size"));
      UploadFile of{std::string(TRY(file.get_string("path"))), size};
      if (!of.path.empty() && !is_safe_relative_path(of.path)) return corrupt("a path leaves the destination");
      out.files.emplace_back(std::move(of), TRY(file.get_string("upload")));
    }
    return out;
  };
  Result<Journal> out = read();
  if (!out) return damaged(out.error());
  return std::optional(std::move(*out));
}

Status Upload::write_journal(bool is_publishing) {
  Json files = Json::array();
  for (std::size_t f = 0; f < files_.size(); ++f)
    files.push_back(Json::object()
                        .set("path", files_[f].path)
                        .set("size", files_[f].size)
                        .set("upload", uploads_[f] ? uploads_[f]->id : std::string()));
  Json replaced = Json::array();
  for (const std::string& name : replaced_) replaced.push_back(name);
  const std::string text = to_text(Json::object()
                                       .set("reshard_upload", 1)
                                       .set("destination", to_.path)
                                       .set("facts", options_.facts)
                                       .set("part_bytes", part_bytes_)
                                       .set("publishing", is_publishing)
                                       .set("replaced", std::move(replaced))
                                       .set("files", std::move(files)),
                                   1);
  const std::string path = journal_path();
  if (!is_url(path)) return replace_file(path, text);
  TRY(writer_.put(parse_url(path).key, as_bytes(text)));
  return {};
}

// Decides whether the destination may be replaced. Files that a killed run of the same output has published do not
// prevent it.
Status Upload::look_at_destination(const std::optional<Journal>& left) {
  if (!TRY(find_stored(to_.path))) return {};
  const Node self = TRY(look_at(to_.path));
  std::set<std::string> own;
  if (left && left->is_publishing) {
    own.insert(left->replaced.begin(), left->replaced.end());
    for (const auto& [file, id] : left->files) own.insert(file.path);
  }
  if (!own.empty()) {
    const OldOutput there = TRY(look_at_old(to_.path));
    const bool all_own = std::all_of(there.inside.begin(), there.inside.end(),
                                     [&](const Node& node) { return node.is_directory() || own.contains(node.name); });
    if (all_own) return {};
  }
  if (!to_.files_of_checkpoint) return usage_error(to_.path + ": the destination exists; --force replaces it");
  const bool is_file = files_.size() == 1 && files_[0].path.empty();
  if (is_file != self.is_regular())
    return usage_error(to_.path + ": the destination is " + (is_file ? "a directory" : "an object") +
                       "; it will not be replaced");
  if (is_file) {
    if (!options_.is_own_file || !TRY(options_.is_own_file(to_.path)))
      return usage_error(to_.path + ": the destination is not a file of this format; it will not be replaced");
    old_ = TRY(look_at_old(to_.path));
    return {};
  }
  old_ = TRY(replaceable_directory(to_, to_.path));
  return {};
}

// Returns why a run cannot resume; empty if it can.
Result<std::string> Upload::why_not(const Journal& left) const {
  if (left.facts != options_.facts) return std::string("its options or its source differ");
  const bool is_alike = left.part_bytes == part_bytes_ && left.files.size() == files_.size() &&
                        std::equal(files_.begin(), files_.end(), left.files.begin(), [](const auto& a, const auto& b) {
                          return a.path == b.first.path && a.size == b.first.size;
                        });
  return std::string(is_alike ? "" : "its files differ");
}

// Takes over the uploads of a killed run.
Status Upload::take_up(const Journal& left) {
  if (left.is_publishing && !old_) replaced_ = left.replaced;
  std::atomic<Index> found{0};
  TRY(parallel_for(std::ssize(files_), kRequestsAtOnce, [&](int, Index i) -> Status {
    const std::size_t f = i;
    const std::string &id = left.files[f].second, key = key_of(files_[f]);
    if (id.empty()) return {};
    auto parts = TRY(writer_.parts(key, id));
    if (parts) {
      found += std::ssize(*parts);
      uploads_[f] = Parts{id, std::move(*parts)};
    } else if (left.is_publishing) {
      const auto object = TRY(find_stored(url_of(key)));
      if (object && object->entry.size == files_[f].size) {
        uploads_[f] = Parts{"", {}};
        etags_[f] = object->version;
      }
    }
    return {};
  }));
  if (options_.on_note)
    options_.on_note("resuming " + to_.path + ": " + count_of(found, "part") +
                     " already uploaded; each is computed again "
                     "and not sent if it is the same");
  return {};
}

// Removes what a killed run has left.
Status Upload::drop(const Journal& left) {
  TRY(parallel_for(std::ssize(left.files), kRequestsAtOnce, [&](int, Index i) -> Status {
    const auto& [file, id] = left.files[i];
    if (!id.empty()) TRY(writer_.abort_upload(key_of(file), id));
    if (left.is_publishing && !old_) TRY(writer_.remove(key_of(file)));
    return {};
  }));
  if (left.is_publishing && !old_)
    for (const std::string& name : left.replaced) TRY(writer_.remove(url_.key + "/" + name));
  TRY(remove_journal());
  forget_stored(to_.path);
  return {};
}

// ---- sending

// Begins the uploads that no killed run has begun, and records all of them.
Status Upload::begin() {
  is_begun_ = true;
  for (std::size_t f = 0; f < files_.size(); ++f)
    if (!uploads_[f] && files_[f].size > 0 && (files_[f].holds_tensors || files_[f].size > part_bytes_))
      uploads_[f].emplace();
  TRY(parallel_for(std::ssize(files_), kRequestsAtOnce, [&](int, Index i) -> Status {
    const std::size_t f = i;
    if (uploads_[f] && uploads_[f]->id.empty() && etags_[f].empty())
      uploads_[f]->id = TRY(writer_.begin_upload(key_of(files_[f])));
    return {};
  }));
  return write_journal(false);
}

// Sends the list of uploads to the other ranks.
Status Upload::share_uploads() {
  if (rank_count(options_.ranks) == 1) return {};
  Json uploads = Json::array();
  for (const auto& upload : uploads_) {
    Json known = Json::array();
    if (upload)
      for (const StoredPart& part : upload->known)
        known.push_back(Json::object().set("number", part.number).set("size", part.size).set("etag", part.etag));
    uploads.push_back(upload ? Json::object().set("id", upload->id).set("known", std::move(known)) : Json());
  }
  const std::string text = TRY(broadcast(options_.ranks, to_text(uploads, 0)));
  if (rank_of(options_.ranks) == 0) return {};
  const Json told = TRY(parse_json(text, "rank 0"));
  std::size_t f = 0;
  for (const Json& upload : TRY(told.as_array())) {
    if (!upload.is_null()) {
      Parts& parts = uploads_[f].emplace();
      parts.id = TRY(upload.get_string("id"));
      for (const Json& part : TRY(upload.get_array("known"))) {
        const Index number = TRY(part.get_index("number")), size = TRY(part.get_index("size"));
        const std::string_view etag = TRY(part.get_string("etag"));
        parts.known.push_back({static_cast<int>(number), size, std::string(etag)});
      }
    }
    ++f;
  }
  return {};
}

// Sends the ETags of all uploaded parts to rank 0.
Status Upload::gather_etags() {
  if (rank_count(options_.ranks) == 1) return {};
  Json mine = Json::array();
  for (const auto& upload : uploads_) {
    Json etags = Json::array();
    if (upload)
      for (const std::string& etag : upload->etags) etags.push_back(etag);
    mine.push_back(std::move(etags));
  }
  for (const std::string& text : TRY(gather(options_.ranks, to_text(mine, 0)))) {
    const Json theirs = TRY(parse_json(text, "a rank"));
    std::size_t f = 0;
    for (const Json& etags : TRY(theirs.as_array())) {
      std::size_t i = 0;
      for (const Json& etag : TRY(etags.as_array())) {
        if (const auto sent = TRY(etag.as_string()); !sent.empty()) uploads_[f]->etags[i] = sent;
        ++i;
      }
      ++f;
    }
  }
  return {};
}

// Returns whether this rank sends the part, or the file, at `offset`. The ranks divide the bytes of all files into
// equal contiguous shares, and the middle of a part decides.
bool Upload::is_mine(std::uint32_t file, Index offset) const {
  const Index share = std::max<Index>(1, ceil_div(begins_.back(), rank_count(options_.ranks)));
  const Index begin = options_.divides_files ? offset / part_bytes_ * part_bytes_ : 0;
  const Index length = options_.divides_files ? std::min(part_bytes_, files_[file].size - begin) : files_[file].size;
  return (begins_[file] + begin + length / 2) / share == rank_of(options_.ranks);
}

// Returns the parts that this rank sends: its share, in order; those of the last turn, which come last, are all rank
// 0's.
std::vector<Upload::Part> Upload::parts_of(const Source& source) const {
  std::vector<Part> out;
  for (std::uint32_t f = 0; f < files_.size(); ++f) {
    if (!uploads_[f] || !files_[f].holds_tensors) continue;
    for (Index offset = 0; offset < files_[f].size; offset += part_bytes_) {
      const Index length = std::min(part_bytes_, files_[f].size - offset);
      const Turn turn = source.turn ? source.turn(f, offset, length) : Turn::kAnyTime;
      if (turn == Turn::kLast ? rank_of(options_.ranks) == 0 : is_mine(f, offset))
        out.push_back({f, static_cast<int>(offset / part_bytes_) + 1, offset, length, turn});
    }
  }
  std::stable_sort(out.begin(), out.end(), [&](const Part& a, const Part& b) {
    const bool a_is_last = a.turn == Turn::kLast, b_is_last = b.turn == Turn::kLast;
    return std::tuple(a_is_last, a.file, a.turn) < std::tuple(b_is_last, b.file, b.turn);
  });
  return out;
}

std::vector<Upload::Part>::const_iterator Upload::first_of_last_turn(const std::vector<Part>& parts) {
  return std::find_if(parts.begin(), parts.end(), [](const Part& part) { return part.turn == Turn::kLast; });
}

Status Upload::send(const Source& source, const std::function<void(Index bytes)>& progress) {
  const std::vector<Part> parts = parts_of(source);
  for (std::size_t f = 0; f < files_.size(); ++f)
    if (uploads_[f]) uploads_[f]->etags.resize(ceil_div(files_[f].size, part_bytes_));
  std::atomic<Index> done{0};
  return send_parts({parts.begin(), first_of_last_turn(parts)}, source, [&](Index bytes) {
    if (progress) progress(done += bytes);
  });
}

Status Upload::send_parts(std::span<const Part> parts, const Source& source,
                          const std::function<void(Index bytes)>& report) {
  const int workers = static_cast<int>(std::clamp<Index>(std::ssize(parts), 1, options_.workers));
  std::vector<std::vector<std::byte>> buffers(workers);
  PartsAhead ahead(source, options_.reads_ahead ? workers : 0);
  return parallel_for(std::ssize(parts), workers, [&](int worker, Index i) -> Status {
    if (options_.interrupt && *options_.interrupt) return io_error("interrupted");
    if (is_stopped(options_.ranks)) return job_is_over();
    const Part& part = parts[i];
    ahead.begin(i, std::ssize(parts), [&](Index k) {
      const Part& next = parts[k];
      return std::tuple(next.file, next.offset, next.length);
    });
    std::vector<std::byte>& buffer = buffers[worker];
    buffer.resize(part.length);
    TRY(source.read(part.file, part.offset, buffer));
    TRY(send_part(part, buffer));
    report(part.length);
    return {};
  });
}

Status Upload::send_part(const Part& part, Bytes bytes) {
  Parts& upload = *uploads_[part.file];
  std::string& etag = upload.etags[part.number - 1];
  const std::string sum = md5(as_string(bytes));
  etag = etag_of_sum(sum);
  if (upload.id.empty()) return {};
  const auto known = std::find_if(upload.known.begin(), upload.known.end(),
                                  [&](const StoredPart& there) { return there.number == part.number; });
  if (known != upload.known.end() && known->size == part.length && known->etag == etag) return {};
  etag = TRY(writer_.put_part(key_of(files_[part.file]), upload.id, part.number, bytes, sum));
  return {};
}

// ---- publishing

Status Upload::publish(const Source& source) {
  TRY(gather_etags());
  if (rank_of(options_.ranks) == 0) {
    const std::vector<Part> parts = parts_of(source);
    TRY(send_parts({first_of_last_turn(parts), parts.end()}, source, [](Index) {}));
    TRY(make_visible(source));
  }
  return barrier(options_.ranks);
}

Status Upload::make_visible(const Source& source) {
  if (old_) TRY(find_replaced());
  TRY(write_journal(true));
  is_publishing_ = true;
  TRY(remove_replaced());
  const auto all = [&](const auto& is_wanted, const auto& finish) {
    return parallel_for(std::ssize(files_), kRequestsAtOnce, [&](int, Index i) -> Status {
      const auto f = static_cast<std::uint32_t>(i);
      return is_wanted(f) ? finish(f) : Status();
    });
  };
  TRY(all([&](std::uint32_t f) { return files_[f].holds_tensors && uploads_[f]; },
          [&](std::uint32_t f) { return complete(f); }));
  for (std::uint32_t f = 0; f < files_.size(); ++f)
    if (!files_[f].holds_tensors || !uploads_[f]) TRY(put(f, source));
  TRY(check_listed());
  is_kept_ = true;
  return remove_journal().context("the new checkpoint is complete in " + to_.path +
                                  ", but the journal could not be removed");
}

// Lists what is removed of the old checkpoint: metadata first, as small files.
Status Upload::find_replaced() {
  forget_stored(to_.path);
  const auto now = look_at_old(to_.path);
  if (!now || !(*now == *old_)) return io_error(to_.path + ": was changed while this job ran, and is left as it is");
  std::vector<const Node*> files;
  for (const Node& node : old_->inside)
    if (!node.is_directory()) files.push_back(&node);
  std::stable_sort(files.begin(), files.end(), [](const Node* a, const Node* b) { return a->size < b->size; });
  replaced_.clear();
  for (const Node* node : files) replaced_.push_back(node->name);
  return {};
}

// Removes the old checkpoint. Everything new has been uploaded by now; if the old files stayed until they are replaced
// one by one, readers could see files of both. What a killed run has completed already is not removed.
Status Upload::remove_replaced() {
  std::set<std::string> completed;
  for (std::size_t f = 0; f < files_.size(); ++f)
    if (uploads_[f] && uploads_[f]->id.empty()) completed.insert(files_[f].path);
  for (const std::string& name : replaced_)
    if (!completed.contains(name)) TRY(writer_.remove(url_.key + "/" + name));
  return {};
}

Status Upload::complete(std::uint32_t f) {
  Parts& upload = *uploads_[f];
  const std::string key = key_of(files_[f]), expected = etag_of_parts(upload.etags);
  if (upload.id.empty()) {
    if (!is_md5_etag(etags_[f]) || expected == etags_[f]) return {};
    return io_error(url_of(key) + ": was changed since the killed run wrote it; add --resume never to start over");
  }
  const auto etag = TRY(writer_.complete_upload(key, upload.id, upload.etags));
  if (etag && is_md5_etag(*etag) && etag->find('-') != std::string::npos && !expected.empty() && *etag != expected)
    return io_error(url_of(key) + ": the server has other bytes than were sent (ETag " + printable(*etag) +
                    ", expected " + expected + ")");
  etags_[f] = etag ? *etag : expected;
  return {};
}

// Writes a file that holds no tensors.
Status Upload::put(std::uint32_t f, const Source& source) {
  const UploadFile& file = files_[f];
  std::vector<std::byte> buffer(std::min(file.size, part_bytes_));
  if (!uploads_[f]) {
    if (file.size > 0) TRY(source.read(f, 0, buffer));
    etags_[f] = TRY(writer_.put(key_of(file), buffer));
    return {};
  }
  for (Index offset = 0; offset < file.size; offset += part_bytes_) {
    const Index length = std::min(part_bytes_, file.size - offset);
    const MutableBytes bytes = MutableBytes(buffer).first(length);
    TRY(source.read(f, offset, bytes));
    TRY(send_part({f, static_cast<int>(offset / part_bytes_) + 1, offset, length}, bytes));
  }
  return complete(f);
}

// Checks that the store lists each file with its size, and with the ETag that was computed from its bytes.
Status Upload::check_listed() {
  forget_stored(to_.path);
  StoredTree& tree = *TRY(StoredTree::of(url_));
  (void)tree.list(url_);  // from now on all are found by listing, if that is allowed
  return parallel_for(std::ssize(files_), 1, [&](int, Index i) -> Status {
    const std::size_t f = i;
    const std::string key = key_of(files_[f]), url = url_of(key);
    auto there = TRY(tree.find(parse_url(url)));
    if (!there) there = TRY(tree.storage().stat(key));  // listings of some stores lag behind
    if (!there) return io_error(url + ": the store does not list it after it was written");
    if (there->entry.size != files_[f].size)
      return io_error(url + ": expected " + bytes_of(files_[f].size) + ", the store has " +
                      with_commas(there->entry.size));
    const bool are_comparable =
        is_md5_etag(there->version) && is_md5_etag(etags_[f]) &&
        (there->version.find('-') == std::string::npos) == (etags_[f].find('-') == std::string::npos);
    if (are_comparable && there->version != etags_[f])
      return io_error(url + ": the store has other bytes than were written (ETag " + printable(there->version) +
                      ", expected " + etags_[f] + ")");
    return {};
  });
}

// Aborts all uploads and removes the journal. Returns the uploads that could not be aborted.
std::vector<std::string> Upload::abort_all() {
  std::mutex mutex;
  std::vector<std::string> left;
  (void)parallel_for(std::ssize(files_), kRequestsAtOnce, [&](int, Index i) -> Status {
    const std::size_t f = i;
    if (!uploads_[f] || uploads_[f]->id.empty()) return {};
    if (writer_.abort_upload(key_of(files_[f]), uploads_[f]->id)) return {};
    const std::lock_guard lock(mutex);
    left.push_back(printable(url_of(key_of(files_[f]))) + " (upload " + printable(uploads_[f]->id) + ")");
    return {};
  });
  if (left.empty()) (void)remove_journal();
  return left;
}

Error Upload::give_up(const Error& error) {
  const bool is_interrupted = is_http_interrupted() || (options_.interrupt && *options_.interrupt);
  if (is_kept_ || !is_begun_) return error;
  is_kept_ = true;
  const std::string resume = "rerun the same command to resume, or add --resume never to start over";
  if (is_publishing_)
    return {error.code(), error.message() + ". All data is uploaded, and " + to_.path +
                              " is incomplete: rerun the same command to complete it"};
  if (is_interrupted)
    return {error.code(),
            error.message() + ". What is uploaded stays, and is recorded in " + uploads_place() + ": " + resume};
  const std::vector<std::string> left = abort_all();
  if (left.empty()) return error;
  return {error.code(), error.message() + ". " + count_of(std::ssize(left), "upload") +
                            " could not be aborted, and the store may bill them: " + some_of(left, 5) + "; " + resume};
}

}  // namespace reshard
