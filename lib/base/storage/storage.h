// SPDX-License-Identifier: Apache-2.0
// What is stored elsewhere, as files and directories: the seam below File, list_directory() and entry_at(). Local files
// are those functions' own row; a URL goes to one of these.
#pragma once

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
#include "lib/base/storage/read_ahead.h"
#include "lib/base/storage/url.h"

namespace reshard {

// One object, or a directory, by its own name.
struct StoredObject {
  DirectoryEntry entry;
  std::string version;  // ETag, which pins it; empty: the store has none
};

inline StoredObject directory_object(std::string name) {
  StoredObject out;
  out.entry.name = std::move(name);
  out.entry.is_directory = true;
  return out;
}

struct Listing {
  bool is_allowed = true;  // false: the store does not say what is there
  std::string why_not;     // for a message
  std::vector<StoredObject> objects;
};

// A bucket, a repository or a host. Keys are relative to its root and have no slash at either end. Thread-safe.
class Storage {
 public:
  virtual ~Storage() = default;
  // Lists one level below a key ("": all). Nothing is in a directory that does not exist.
  virtual Result<Listing> list(const std::string& key) = 0;
  // The object of that key; nothing if there is none, or only a directory.
  virtual Result<std::optional<StoredObject>> stat(const std::string& key) = 0;
  // Fills `out` with the bytes from `offset` on of the object as it was listed; an I/O error if it was replaced since.
  virtual Status read(const std::string& key, const StoredObject& object, Index offset, MutableBytes out) = 0;
};

// The storage behind the root of a URL.
Result<std::unique_ptr<Storage>> open_storage(const std::string& root);

// A storage with its answers kept: for as long as nobody calls forget(), an object is the version that was seen first.
class StoredTree {
 public:
  // Of a URL, opened when it is first asked for; lives as long as the process.
  static Result<StoredTree*> of(const Url& url);

  // As list_directory() and entry_at() do it.
  Result<std::vector<DirectoryEntry>> list(const Url& url);
  Result<std::optional<StoredObject>> find(const Url& url);
  // Lets answers about `url`, and all below it, be asked for anew.
  void forget(const Url& url);
  Storage& storage() { return *storage_; }

  explicit StoredTree(std::unique_ptr<Storage> storage) : storage_(std::move(storage)) {}

 private:
  using Objects = std::map<std::string, StoredObject, std::less<>>;  // by name
  struct Directory {
    bool is_allowed = true;
    std::string why_not;
    Objects objects;
  };
  Result<std::shared_ptr<const Directory>> directory(const std::string& key);
  std::shared_ptr<const Directory> known(const std::string& key) const;
  std::optional<std::optional<StoredObject>> found(const std::string& key) const;
  bool is_inside_listed(const std::string& key) const;
  bool holds_known(const std::string& key) const;
  Result<std::optional<StoredObject>> ask(const Url& url);

  std::unique_ptr<Storage> storage_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Directory>> directories_;  // by key
  std::map<std::string, std::optional<StoredObject>> found_;             // objects that were asked for by name
};

// What File has of an object. Thread-safe.
class StoredFile {
 public:
  static Result<std::shared_ptr<const StoredFile>> open(const std::string& url);
  Index size() const { return object_.entry.size; }
  // The URL and the version: equal for files of the same bytes.
  const std::string& identity() const { return identity_; }
  // As File::read_at(), from what was fetched ahead (read_ahead.h) as far as there is any.
  Status read_at(Index offset, MutableBytes out) const;
  // Asks the store, in one request. The range lies in the file.
  Status read_stored(Index offset, MutableBytes out) const;

 private:
  StoredFile(std::string path, std::string key, StoredObject object, Storage& storage)
      : path_(std::move(path)),
        key_(std::move(key)),
        object_(std::move(object)),
        identity_(path_ + "\n" + object_.version),
        storage_(storage) {}
  void expect_next(Index offset, Index length, bool was_fetched) const;
  Status read_parts(Index offset, MutableBytes out) const;
  Status read_short(Index offset, MutableBytes out) const;

  const std::string path_, key_;
  const StoredObject object_;
  const std::string identity_;
  Storage& storage_;
  mutable std::mutex mutex_;
  mutable Index next_ = 0;         // where the last read ended
  mutable Index ahead_until_ = 0;  // what follows it was asked for up to here
  mutable ReadAhead ahead_;
};

// Those functions of file.h, of a URL.
Result<std::vector<DirectoryEntry>> list_stored(const std::string& url);
Result<std::optional<StoredObject>> find_stored(const std::string& url);
// Opens the storage of a URL, with the library, the credentials and, of the hub, the commit that it takes: for what can
// be done no more in a sandbox.
Status prepare_stored(const std::string& url);
// Before a checkpoint is opened: what was known of its files is asked for again. Nothing happens to local paths.
void forget_stored(const std::string& url);

}  // namespace reshard
