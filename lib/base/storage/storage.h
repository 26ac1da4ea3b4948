// SPDX-License-Identifier: Apache-2.0
// Object stores as files and directories: the seam below File, list_directory() and entry_at(). These functions handle
// local paths themselves and pass URLs on to a Storage.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/file.h"
#include "lib/base/result.h"
#include "lib/base/storage/likely_reads.h"
#include "lib/base/storage/object_writer.h"
#include "lib/base/storage/read_ahead.h"
#include "lib/base/storage/url.h"

namespace reshard {

// An object or a directory. Its entry has the last component of its key as its name.
struct StoredObject {
  DirectoryEntry entry;
  std::string version;  // the ETag that reads are pinned to; empty: the store has none
};

inline StoredObject directory_object(std::string name) {
  StoredObject out;
  out.entry.name = std::move(name);
  out.entry.is_directory = true;
  return out;
}

struct Listing {
  bool is_allowed = true;  // false: the store does not list its objects
  bool is_whole = true;    // false: it has more than one reply holds
  std::string why_not;     // the reason, for a message
  std::vector<StoredObject> objects;
  // The complete contents of directories below, by path relative to the listed one, as far as the store sent them, too.
  std::map<std::string, std::vector<StoredObject>> below = {};
};

// A bucket, a repository or a host. Keys are relative to its root and have no slash at either end. Thread-safe.
class Storage {
 public:
  virtual ~Storage() = default;
  // Lists one level below `key` ("": the root); with kAllIfFew also the directories below if they fit in one reply;
  // with kOneReply at most what one reply holds. A directory that does not exist is empty.
  enum class Depth { kOneLevel, kAllIfFew, kOneReply };
  virtual Result<Listing> list(const std::string& key, Depth depth) = 0;
  // Returns the object with this key; nothing if there is none, or only a directory.
  virtual Result<std::optional<StoredObject>> stat(const std::string& key) = 0;
  // Fills `out` with the bytes of `object` from `offset` on. Fails (I/O) if the object was replaced after it was
  // listed.
  virtual Status read(const std::string& key, const StoredObject& object, Index offset, MutableBytes out) = 0;
  // Returns the part of the storage that writes, which it owns; null if it can only be read.
  virtual ObjectWriter* writer() { return nullptr; }
};

// Opens the storage at the root of a URL.
Result<std::unique_ptr<Storage>> open_storage(const std::string& root);

// A storage whose answers are cached: until forget() is called, an object stays the version that was seen first. What a
// listing answers is not requested again. Thread-safe.
class StoredTree {
 public:
  // Returns the tree of a URL's root. Opens it at the first call and keeps it until the process ends.
  static Result<StoredTree*> of(const Url& url);

  // Like list_directory() and entry_at(), for a URL.
  Result<std::vector<DirectoryEntry>> list(const Url& url);
  Result<std::optional<StoredObject>> find(const Url& url);
  // Drops the cached answers about `url` and everything below it.
  void forget(const Url& url);
  Storage& storage() { return *storage_; }
  // Call before reading bytes of an object that were not fetched ahead. Fetches what is likely to be read after them
  // (likely_reads.h).
  void expect_after(const std::string& key, Index size, Index offset, Index length);

  StoredTree(std::string root, std::unique_ptr<Storage> storage)
      : root_(std::move(root)), storage_(std::move(storage)) {}

 private:
  using Objects = std::map<std::string, StoredObject, std::less<>>;  // by name
  struct Directory {
    bool is_allowed = true;
    std::string why_not;
    Objects objects;
  };
  static std::shared_ptr<Directory> directory_of(std::vector<StoredObject> objects);
  Result<std::shared_ptr<const Directory>> directory(const std::string& key);
  std::shared_ptr<const Directory> keep(const std::string& key, Listing listing);
  Status list_if_asked_before(const std::string& key);
  std::shared_ptr<const Directory> known(const std::string& key) const;
  std::optional<std::optional<StoredObject>> found(const std::string& key) const;
  bool is_inside_listed(const std::string& key) const;
  bool is_absent(const Directory& listed, const std::string& name) const;
  bool is_ruled_out(const std::string& key) const;
  bool holds_listed(const std::string& key) const;
  bool holds_known(const std::string& key) const;
  Result<std::optional<StoredObject>> ask(const Url& url);
  std::vector<LikelyReads::Object> listed_objects() const;

  const std::string root_;
  std::unique_ptr<Storage> storage_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Directory>> directories_;  // by key
  std::map<std::string, std::optional<StoredObject>> found_;             // objects that were looked up by key
  std::map<std::string, bool> missed_in_;  // directories where a name was looked up in vain; whether to list them
  Index changes_ = 0;                      // of directories_
  std::mutex likely_mutex_;                // guards what follows; taken before mutex_
  LikelyReads likely_;
  Index known_changes_ = 0;  // changes_ when likely_ was told of the objects
  struct Guess {
    std::unique_ptr<ReadAhead> fetched = std::make_unique<ReadAhead>();
    Index bytes = 0;
  };
  std::list<Guess> likely_ahead_;  // oldest first
};

// An open object, the part of a File that is behind a URL. Thread-safe.
class StoredFile {
 public:
  static Result<std::shared_ptr<const StoredFile>> open(const std::string& url);
  Index size() const { return object_.entry.size; }
  // Returns the URL and the version: equal identities mean equal bytes.
  const std::string& identity() const { return identity_; }
  // Like File::read_at(). Uses what was fetched ahead (read_ahead.h) and requests the rest.
  Status read_at(Index offset, MutableBytes out) const;
  // Fetches what is likely to be read after this range (likely_reads.h).
  void expect_after(Index offset, Index length) const;
  // Reads the range, which must be inside the object, in one request.
  Status read_stored(Index offset, MutableBytes out) const;

 private:
  StoredFile(std::string path, const Url& url, StoredObject object, StoredTree& tree)
      : path_(std::move(path)),
        key_(url.key),
        object_(std::move(object)),
        identity_(url.root + "/" + url.key + "\n" + object_.version),
        tree_(tree) {}
  void expect_next(Index offset, Index length, bool was_fetched) const;
  Status read_parts(Index offset, MutableBytes out) const;
  Status read_short(Index offset, MutableBytes out) const;

  const std::string path_, key_;
  const StoredObject object_;
  const std::string identity_;
  StoredTree& tree_;
  mutable std::mutex mutex_;
  mutable Index next_ = 0;         // the end of the last read
  mutable Index in_order_ = 0;     // bytes of the reads before it, as far as each continued the one before
  mutable Index ahead_until_ = 0;  // the end of what expect_next() has requested
  mutable ReadAhead ahead_;
};

// Fetches ranges at which other files that are laid out alike are read, too: then these are fetched together
// (likely_reads.h).
void fetch_as_in_others(const std::vector<FileRange>& ranges, ReadAhead& ahead);
// Implement list_directory() and entry_at() for URLs.
Result<std::vector<DirectoryEntry>> list_stored(const std::string& url);
Result<std::optional<StoredObject>> find_stored(const std::string& url);
// Looks URLs of web servers up at the same time, because each takes a round trip. The answers are cached. Ignores other
// paths: a listing answers for many.
Status look_up_stored(const std::vector<std::string>& paths);
// Opens the storage of a URL: loads the library, reads the credentials and, for the hub, resolves the commit. Call it
// before entering a sandbox, which allows none of these.
Status prepare_stored(const std::string& url);
// Drops the cached answers about a URL, so that opening a checkpoint sees its current files. Ignores local paths.
void forget_stored(const std::string& url);

}  // namespace reshard
