// SPDX-License-Identifier: Apache-2.0
#include "lib/base/storage/storage.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <utility>

#include "lib/base/memory_limit.h"
#include "lib/base/parallel.h"
#include "lib/base/storage/http.h"
#include "lib/base/storage/read_ahead.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

std::string parent_key(const std::string& key) {
  const std::size_t slash = key.rfind('/');
  return slash == std::string::npos ? "" : key.substr(0, slash);
}

// Why roots could not be opened before a sandbox was entered, in which a second try would fail for another reason.
class FailedRoots {
 public:
  void add(const std::string& root, const Error& error) {
    const std::lock_guard lock(mutex_);
    errors_.insert_or_assign(root, error);
  }
  std::optional<Error> find(const std::string& root) {
    const std::lock_guard lock(mutex_);
    const auto at = errors_.find(root);
    return at == errors_.end() ? std::nullopt : std::optional(at->second);
  }
  static FailedRoots& of_process() {
    static auto* const all = new FailedRoots();
    return *all;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, Error> errors_;
};

// Returns whether a name is usually that of a directory: it has no ending, or one like that of "Llama-3.1-8B".
bool may_name_directory(const std::string& name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string::npos || (dot + 1 < name.size() && name[dot + 1] >= '0' && name[dot + 1] <= '9');
}

std::string text_of(const Url& url) { return url.key.empty() ? url.root : url.root + "/" + url.key; }

}  // namespace

Result<StoredTree*> StoredTree::of(const Url& url) {
  // The message does not repeat the URL, which may contain a secret.
  if (url.root.starts_with("http") && (url.root + url.key).find_first_of("?@") != std::string::npos)
    return usage_error(
        "a URL with a user or a password, or a query where none can be, is not read; give one without, or s3:// or "
        "hf://");
  static std::mutex mutex;
  static auto* const trees =
      new std::map<std::string, std::unique_ptr<StoredTree>>();  // never destroyed, like OpenFiles
  const std::lock_guard lock(mutex);
  std::unique_ptr<StoredTree>& tree = (*trees)[url.root];
  if (!tree)
    if (auto error = FailedRoots::of_process().find(url.root)) return std::move(*error);
  if (!tree) tree = std::make_unique<StoredTree>(url.root, TRY(open_storage(url.root)));
  return tree.get();
}

std::shared_ptr<const StoredTree::Directory> StoredTree::known(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = directories_.find(key);
  return found == directories_.end() ? nullptr : found->second;
}

// Returns the cached result of looking an object up by name; nothing if it was not looked up.
std::optional<std::optional<StoredObject>> StoredTree::found(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto at = found_.find(key);
  if (at == found_.end()) return std::nullopt;
  return std::optional<std::optional<StoredObject>>(std::in_place, at->second);
}

std::shared_ptr<StoredTree::Directory> StoredTree::directory_of(std::vector<StoredObject> objects) {
  auto out = std::make_shared<Directory>();
  for (StoredObject& object : objects) {
    const std::string name = object.entry.name;
    if (!is_usable_key(name) || name.find('/') != std::string::npos) continue;
    // If a key is both an object and a prefix, an empty object only marks the directory.
    const bool wins = !object.entry.is_directory && object.entry.size > 0;
    const auto [at, is_new] = out->objects.try_emplace(name, object);
    if (!is_new && (wins || at->second.entry.size == 0)) at->second = wins ? std::move(object) : directory_object(name);
  }
  return out;
}

Result<std::shared_ptr<const StoredTree::Directory>> StoredTree::directory(const std::string& key) {
  if (auto there = known(key)) return there;
  if (is_ruled_out(key)) return std::make_shared<const Directory>();
  // A directory above one that is known already is only searched for a name.
  const auto depth = holds_listed(key) ? Storage::Depth::kOneLevel : Storage::Depth::kAllIfFew;
  return keep(key, TRY(storage_->list(key, depth)));
}

std::shared_ptr<const StoredTree::Directory> StoredTree::keep(const std::string& key, Listing listing) {
  auto made = directory_of(std::move(listing.objects));
  made->is_allowed = listing.is_allowed;
  made->why_not = std::move(listing.why_not);
  const std::string below = key.empty() ? "" : key + "/";
  const std::lock_guard lock(mutex_);
  ++changes_;
  for (auto& [path, objects] : listing.below)
    if (is_usable_key(path)) directories_.try_emplace(below + path, directory_of(std::move(objects)));
  return directories_.try_emplace(key, std::move(made)).first->second;
}

// Lists the directory of a key if another name in it was looked up in vain: one request then answers for all names,
// where each would take two. Does not list web servers, which take a request for each name that is there.
Status StoredTree::list_if_asked_before(const std::string& key) {
  const std::string above = parent_key(key);
  {
    const std::lock_guard lock(mutex_);
    const auto missed = missed_in_.find(above);
    if (!lists_hidden(root_) || missed == missed_in_.end() || !std::exchange(missed->second, false)) return {};
  }
  if (known(above)) return {};
  Listing listing = TRY(storage_->list(above, Storage::Depth::kOneReply));
  if (listing.is_whole) keep(above, std::move(listing));
  return {};
}

// Returns whether a listing shows that a directory has nothing of this name.
bool StoredTree::is_absent(const Directory& listed, const std::string& name) const {
  return listed.is_allowed && !listed.objects.contains(name) && (lists_hidden(root_) || !name.starts_with('.'));
}

// Returns whether a listing shows that there is nothing with this key, and so nothing below it.
bool StoredTree::is_ruled_out(const std::string& key) const {
  for (std::string inner = key; !inner.empty(); inner = parent_key(inner)) {
    if (const auto listed = known(parent_key(inner))) return is_absent(*listed, base_name(inner));
  }
  return false;
}

// Returns whether a directory or an object below this one is known.
bool StoredTree::holds_listed(const std::string& key) const {
  const std::string below = key.empty() ? "" : key + "/";
  const std::lock_guard lock(mutex_);
  const auto at = directories_.upper_bound(below);
  return (at != directories_.end() && at->first.starts_with(below)) || [&] {
    const auto object = found_.lower_bound(below);
    return object != found_.end() && object->first.starts_with(below);
  }();
}

// Returns whether a parent directory was listed. If so, names below it are also looked up by listing.
bool StoredTree::is_inside_listed(const std::string& key) const {
  for (std::string above = parent_key(key);; above = parent_key(above)) {
    if (const auto listed = known(above)) return listed->is_allowed;
    if (above.empty()) return false;
  }
}

// Returns whether an object below `key` was looked up by name and found.
bool StoredTree::holds_known(const std::string& key) const {
  const std::string below = key.empty() ? "" : key + "/";
  const std::lock_guard lock(mutex_);
  for (auto at = found_.lower_bound(below); at != found_.end() && at->first.starts_with(below); ++at)
    if (at->second) return true;
  return false;
}

// A key can be an object and, at the same time, a directory. Then it is the object, unless the URL ends in a slash.
Result<std::optional<StoredObject>> StoredTree::find(const Url& url) {
  const auto directory_here = [&] { return std::optional(directory_object(base_name(url.key))); };
  if (url.key.empty()) return std::optional(directory_object(base_name(url.root)));
  const auto seen = found(url.key);
  if (seen && *seen && !url.is_directory) return *seen;
  const auto own = known(url.key);
  if (own && !own->objects.empty() && (seen || url.is_directory)) return directory_here();
  if (!seen && !own) TRY(list_if_asked_before(url.key));
  if (is_inside_listed(url.key)) {
    const auto parent = TRY(directory(parent_key(url.key)));
    const std::string name = base_name(url.key);
    const auto at = parent->objects.find(name);
    if (at != parent->objects.end() && at->second.entry.is_directory >= url.is_directory)
      return std::optional(at->second);
    if (is_absent(*parent, name)) return std::optional<StoredObject>();
  }
  std::optional<StoredObject> object = seen && !url.is_directory ? std::nullopt : TRY(ask(url));
  if (!object && holds_known(url.key)) return directory_here();
  return object;
}

// Looks up an object by name. If it does not exist or is empty, lists the keys below it: at the same time if the name
// is usually that of a directory, to save a round trip.
Result<std::optional<StoredObject>> StoredTree::ask(const Url& url) {
  std::optional<StoredObject> object;
  if (!url.is_directory) {
    TRY(parallel_for(may_name_directory(base_name(url.key)) ? 2 : 1, 2, [&](int, Index i) -> Status {
      if (i == 0)
        object = TRY(storage_->stat(url.key));
      else
        (void)directory(url.key);  // kept if it succeeds, and repeated below if needed
      return {};
    }));
  }
  if (object && object->entry.is_directory) return object;
  const bool may_mark = !object || object->entry.size == 0;  // an empty object may only mark a directory
  const auto below = may_mark ? TRY(directory(url.key)) : nullptr;
  const bool is_directory = below && !below->objects.empty();
  if (!url.is_directory) {
    const std::lock_guard lock(mutex_);
    found_.try_emplace(url.key, is_directory ? std::nullopt : object);
    if (!object && !is_directory) missed_in_.try_emplace(parent_key(url.key), true);
  }
  if (is_directory) return std::optional(directory_object(base_name(url.key)));
  if (!may_mark) return object;
  const bool is_around_known = holds_known(parent_key(url.key)) || is_inside_listed(url.key);
  if (!object && !below->is_allowed && !below->why_not.empty() && !is_around_known)
    return io_error(text_of(url) + ": " + below->why_not);
  return object;
}

Result<std::vector<DirectoryEntry>> StoredTree::list(const Url& url) {
  const auto there = TRY(directory(url.key));
  std::map<std::string, DirectoryEntry> out;
  for (const auto& [name, object] : there->objects) out.emplace(name, object.entry);
  if (!there->is_allowed || !lists_hidden(url.root)) {
    const std::string below = url.key.empty() ? "" : url.key + "/";
    const std::lock_guard lock(mutex_);
    for (auto at = found_.lower_bound(below); at != found_.end() && at->first.starts_with(below); ++at)
      if (at->second && at->first.find('/', below.size()) == std::string::npos)
        out.emplace(at->second->entry.name, at->second->entry);
    if (out.empty() && !there->is_allowed) return io_error(text_of(url) + ": " + there->why_not);
  }
  std::vector<DirectoryEntry> entries;
  for (auto& [name, entry] : out) entries.push_back(std::move(entry));
  return entries;
}

std::vector<LikelyReads::Object> StoredTree::listed_objects() const {
  std::vector<LikelyReads::Object> out;
  const std::lock_guard lock(mutex_);
  for (const auto& [key, listed] : directories_)
    for (const auto& [name, object] : listed->objects)
      if (!object.entry.is_directory) out.push_back({path_join(key, name), object.entry.size});
  return out;
}

void StoredTree::expect_after(const std::string& key, Index size, Index offset, Index length) {
  constexpr Index kMostGuessed = Index{8} << 20;  // bytes that wait to be read, of all guesses but the last
  std::vector<FileRange> ranges;
  std::list<Guess> old;  // freed without the lock: that waits for requests in flight
  const std::lock_guard lock(likely_mutex_);
  Index changes = 0;
  {
    const std::lock_guard listings_lock(mutex_);
    changes = changes_;
  }
  if (std::exchange(known_changes_, changes) != changes) likely_.set_objects(listed_objects());
  for (const LikelyReads::Range& range : likely_.after({{key, size}, offset, length}))
    ranges.push_back({root_ + "/" + range.object.key, range.offset, range.length});
  if (ranges.empty()) return;
  Index kept = 0;
  for (const Guess& guess : likely_ahead_) kept += guess.bytes;
  for (; kept > kMostGuessed; kept -= old.back().bytes) old.splice(old.end(), likely_ahead_, likely_ahead_.begin());
  likely_ahead_.emplace_back();
  likely_ahead_.back().fetched->fetch(ranges);
  for (const FileRange& range : ranges) likely_ahead_.back().bytes += range.length;
}

void StoredTree::forget(const Url& url) {
  {
    const std::lock_guard lock(likely_mutex_);
    likely_ = {};
    known_changes_ = 0;
  }
  const auto is_below = [&](const auto& known) {
    return url.key.empty() || known.first == url.key || known.first.starts_with(url.key + "/");
  };
  const std::lock_guard lock(mutex_);
  ++changes_;
  std::erase_if(directories_, is_below);
  std::erase_if(found_, is_below);
  missed_in_.clear();
  for (std::string above = url.key; !above.empty();) directories_.erase(above = parent_key(above));
}

// ---- Files

namespace {

constexpr Index kShort =
    Index{64} << 10;  // the least that a request reads, because small reads (headers) follow each other
constexpr Index kPart = Index{8} << 20;       // bytes per request
constexpr Index kMostKept = Index{16} << 20;  // bytes of all files that RecentStretches keeps

// A cache of the byte ranges that were last read for short requests, for all files.
class RecentStretches {
 public:
  bool copy(const std::string& object, Index offset, MutableBytes out) {
    const std::lock_guard lock(mutex_);
    for (auto at = kept_.begin(); at != kept_.end(); ++at) {
      const Index begin = offset - at->begin;
      if (begin < 0 || begin + std::ssize(out) > std::ssize(at->bytes) || at->object != object) continue;
      std::memcpy(out.data(), at->bytes.data() + begin, out.size());
      kept_.splice(kept_.begin(), kept_, at);
      return true;
    }
    return false;
  }
  void keep(const std::string& object, Index begin, std::vector<std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    size_ += std::ssize(bytes);
    kept_.push_front({object, begin, std::move(bytes)});
    while (size_ > kMostKept) {
      size_ -= std::ssize(kept_.back().bytes);
      kept_.pop_back();
    }
  }
  static RecentStretches& of_process() {
    static auto* const all = new RecentStretches();
    return *all;
  }

 private:
  struct Stretch {
    std::string object;
    Index begin = 0;
    std::vector<std::byte> bytes;
  };
  std::mutex mutex_;
  std::list<Stretch> kept_;
  Index size_ = 0;
};

}  // namespace

Result<std::shared_ptr<const StoredFile>> StoredFile::open(const std::string& url) {
  const Url parsed = parse_url(url);
  StoredTree& tree = *TRY(StoredTree::of(parsed));
  auto object = TRY(tree.find(parsed));
  if (!object) return io_error(url + ": cannot open: not found");
  if (object->entry.is_directory) return io_error(url + ": expected a file");
  return std::shared_ptr<const StoredFile>(new StoredFile(url, parsed, std::move(*object), tree));
}

Status StoredFile::read_at(Index offset, MutableBytes out) const {
  const Index left = std::max<Index>(0, size() - offset);
  if (offset < 0 || std::ssize(out) > left)
    return corrupt(at(path_, offset) + ": expected " + bytes_of(out.size()) + ", got " + std::to_string(left) +
                   " before the end of the file");
  const Index done = take_fetched(*this, offset, out);
  const MutableBytes rest = out.subspan(done);
  expect_next(offset, std::ssize(out), rest.empty());
  // The beginning of a file is often read once more: to recognise its format, and to read it.
  if (rest.empty() && offset == 0 && std::ssize(out) < kShort)
    RecentStretches::of_process().keep(identity_, 0, {out.begin(), out.end()});
  if (rest.empty()) return {};
  return std::ssize(rest) < kShort ? read_short(offset + done, rest) : read_parts(offset + done, rest);
}

// Fetches ahead if the file seems to be read from end to end: by a long read that continues the one before, or begins
// the file. The window grows with what was read in order. Does so only if the bytes were not fetched by someone else's
// ReadAhead.
void StoredFile::expect_next(Index offset, Index length, bool was_fetched) const {
  constexpr Index kLeast = Index{128} << 10, kLeastAtBegin = Index{1} << 20, kMostOfAll = Index{64} << 20;
  constexpr Index kGrowth = 8, kShareOfMemory = 4;
  const std::lock_guard lock(mutex_);
  const bool follows = offset == next_ && offset > 0;
  next_ = offset + length;
  in_order_ = follows ? in_order_ + length : length;
  const bool is_long = follows ? length >= kLeast : offset == 0 && length >= kLeastAtBegin;
  if (!is_long || (was_fetched && ahead_until_ < next_)) return;
  const Index most = std::min(kMostOfAll, memory_left().value_or(kShareOfMemory * kMostOfAll) / kShareOfMemory);
  const Index begin = std::max(next_, ahead_until_),
              wanted = std::min(next_ + std::min(most, kGrowth * in_order_), size());
  if (begin >= wanted) return;
  const Index least = std::clamp<Index>((wanted - next_) / 2, 1, kPart);  // of a request, except the last
  Index end = std::min(wanted, begin + kMostOfAll - fetched_bytes());
  if (end < size()) end = begin + (end - begin) / least * least;
  if (begin >= end) return;
  ahead_until_ = end;
  ahead_.fetch({{path_, begin, end - begin}});
}

void StoredFile::expect_after(Index offset, Index length) const { tree_.expect_after(key_, size(), offset, length); }

Status StoredFile::read_stored(Index offset, MutableBytes out) const {
  return tree_.storage().read(key_, object_, offset, out).context([&] { return at(path_, offset); });
}

Status StoredFile::read_short(Index offset, MutableBytes out) const {
  RecentStretches& recent = RecentStretches::of_process();
  if (recent.copy(identity_, offset, out)) return {};
  expect_after(offset, std::ssize(out));
  std::vector<std::byte> bytes(std::min(kShort, size() - offset));
  TRY(read_stored(offset, bytes));
  std::memcpy(out.data(), bytes.data(), out.size());
  recent.keep(identity_, offset, std::move(bytes));
  return {};
}

Status StoredFile::read_parts(Index offset, MutableBytes out) const {
  const Index parts = ceil_div(std::ssize(out), kPart);
  return parallel_for(parts, static_cast<int>(std::min<Index>(parts, kMostRequests)), [&](int, Index i) -> Status {
    const Index begin = i * kPart, length = std::min(kPart, std::ssize(out) - begin);
    return read_stored(offset + begin, out.subspan(begin, length));
  });
}

Result<std::vector<DirectoryEntry>> list_stored(const std::string& url) {
  const Url parsed = parse_url(url);
  return TRY(StoredTree::of(parsed))->list(parsed);
}

Result<std::optional<StoredObject>> find_stored(const std::string& url) {
  const Url parsed = parse_url(url);
  return TRY(StoredTree::of(parsed))->find(parsed);
}

Status look_up_stored(const std::vector<std::string>& paths) {
  std::vector<std::string> asked;
  for (const std::string& path : paths)
    if (is_url(path) && !lists_hidden(path)) asked.push_back(path);
  return parallel_for(std::ssize(asked), kMostRequests, [&](int, Index i) -> Status {
    TRY(find_stored(asked[i]));
    return {};
  });
}

Status prepare_stored(const std::string& url) {
  const Url parsed = parse_url(url);
  const auto tree = StoredTree::of(parsed);
  if (tree) return {};
  FailedRoots::of_process().add(parsed.root, tree.error());
  return tree.error();
}

void forget_stored(const std::string& url) {
  if (!is_url(url)) return;
  const Url parsed = parse_url(url);
  if (const auto tree = StoredTree::of(parsed)) (*tree)->forget(parsed);
}

}  // namespace reshard
