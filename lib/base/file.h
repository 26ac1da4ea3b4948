// SPDX-License-Identifier: Apache-2.0
// Files: positioned reads and writes, and the few directory operations that a checkpoint needs. Every error names the
// path and the operating system's reason. Functions that read also take URLs (storage/url.h). Objects in
// buckets are written through ObjectWriter (storage/object_writer.h).
#pragma once

#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/result.h"

namespace reshard {

class StoredFile;  // storage/storage.h

// An open file. Owns its descriptor. read_at and write_at may be called from several threads at once.
class File {
 public:
  // kWriteDirect bypasses the page cache. Offsets, lengths and addresses must then be multiples of kDirectUnit; open()
  // fails if the file system does not support it.
  enum class Access { kRead, kReadWrite, kWriteDirect };
  static constexpr Index kDirectUnit = 4096;
  // Opens an existing regular file; anything else is an error.
  static Result<File> open(const std::string& path, Access access = Access::kRead);
  // Creates a file for reading and writing. An existing file or link of that name is an error.
  static Result<File> create(const std::string& path);
  // Creates a file without a name in `directory`, for reading and writing; closing it deletes it.
  static Result<File> create_anonymous(const std::string& directory);
  // Creates such a file in memory. For small contents.
  static Result<File> create_in_memory();

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  // Opens the same file again for reads that bypass the page cache, even if it has been renamed or unlinked. Fails if
  // the file system does not support that.
  Result<File> reopen_direct() const;

  const std::string& path() const { return path_; }
  int descriptor() const { return fd_; }  // owned by this File; do not close it. -1 for a URL
  Result<Index> size() const;

  // Fills all of `out`. A file that ends early is a corrupt error that says how many bytes there were.
  Status read_at(Index offset, MutableBytes out) const;
  Status write_at(Index offset, Bytes data) const;

  // Tells the kernel how the file will be read. With kScattered it does no readahead, which would fetch many times the
  // bytes that are asked for.
  enum class Reads { kInOrder, kScattered };
  void expect(Reads reads) const;

  // Sets the length and reserves the blocks, so that a full disk is reported now and not halfway. If the file system
  // cannot reserve blocks, the file becomes sparse.
  Status allocate(Index length) const;
  // Sets the length without reserving blocks. Unwritten ranges are holes and read as zeros.
  Status set_length(Index length) const;
  // Flushes the data to disk. A failure is final: the kernel has dropped the dirty pages, so a retry would succeed
  // without having written them.
  Status sync_data() const;
  // Closes the file and reports errors that the destructor would have to ignore.
  Status close();

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::string path_;
  std::shared_ptr<const StoredFile> stored_;  // null: a local file
};

// Reads a whole file; a file longer than `limit` bytes is a corrupt error.
Result<std::string> read_whole_file(const std::string& path, Index limit);
// Reads the first `length` bytes of a file, or all of it if it is shorter.
Result<std::string> read_file_start(const std::string& path, Index length);
// Writes `text` to a file, replacing a regular file of that name atomically: readers see the old text or the new one,
// and on an error the old file is unchanged. If the name is a link, pipe or device, it is written to and not replaced.
// Without `replace` an existing name is an error.
Status replace_file(const std::string& path, std::string_view text, bool replace = true);
// Fails if replace_file() could not create a file next to `path`, as it must to replace a regular file.
Status check_can_replace(const std::string& path);

struct DirectoryEntry {
  std::string name;
  bool is_directory = false;
  Index size = 0;  // bytes; 0 for a directory
  Index mtime_ns = 0;
};
// Returns the regular files and directories in a directory, sorted by name, without "." and "..". Follows links and
// leaves out those that lead nowhere.
Result<std::vector<DirectoryEntry>> list_directory(const std::string& path);
// Returns false if the permissions of a directory keep this process from listing it.
Result<bool> may_be_listed(const std::string& directory);
// Returns the entry of a file or directory, following links, or nothing if there is none.
Result<std::optional<DirectoryEntry>> entry_at(const std::string& path);

// A directory entry and its identity, links not followed. Comparing two Nodes tells whether an entry has changed.
struct Node {
  std::string name;
  std::uint64_t device = 0, inode = 0;
  std::uint32_t mode = 0;        // st_mode: type and permissions
  Index size = 0, mtime_ns = 0;  // 0 for directories
  bool is_directory() const;
  bool is_regular() const;
  bool is_link() const;

  friend bool operator==(const Node&, const Node&) = default;
};
Result<Node> look_at(const std::string& path);  // leaves `name` empty
// Returns the same, or nothing if there is no such entry.
Result<std::optional<Node>> node_at(const std::string& path);
// Returns everything below a directory, with names relative to it. A directory precedes its contents.
Result<std::vector<Node>> list_tree(const std::string& directory);

// The following answer questions about paths. Only ENOENT and ENOTDIR mean that nothing is there; after any other
// failure the answer is unknown, which is an error.

// Returns whether `path` is `directory` or is inside it, following links. False if one of them does not exist.
Result<bool> is_at_or_below(const std::string& path, const std::string& directory);
Result<bool> path_exists(const std::string& path);   // true for a dangling link
Result<bool> is_directory(const std::string& path);  // follows links
// Returns whether `path` is a mount point, so that nothing else can be renamed to it.
Result<bool> is_mount_point(const std::string& path);
// Returns the absolute path without links; empty if it leads to nothing.
Result<std::string> real_path(const std::string& path);
// Returns the real path if `path` ends in "." or "..", so that it ends in the directory's own name; otherwise `path`.
Result<std::string> by_own_name(const std::string& path);

std::string path_join(std::string_view directory, std::string_view name);
std::string without_end_slashes(std::string path);  // "a/b//" -> "a/b", "/" -> "/"
std::string parent_path(const std::string& path);   // "a/b/" -> "a", "b" -> ".", "s3://bucket" -> itself
std::string base_name(const std::string& path);     // "a/b/" -> "b"

Status make_directory(const std::string& path);
Status remove_file(const std::string& path);
Status rename_no_replace(const std::string& from, const std::string& to);
Status exchange_paths(const std::string& a, const std::string& b);  // swaps two names atomically
Status sync_directory(const std::string& path);
Status remove_directory(const std::string& path);  // must be empty
// Removes a directory and its contents. Does not follow links.
Status remove_tree(const std::string& path);
Result<Index> free_space(const std::string& path);  // bytes available to an unprivileged user

// Raises the soft limit on open descriptors (RLIMIT_NOFILE) to the hard limit, so that FilePool can keep more files
// open. Only programs should call it; a library leaves limits alone.
void raise_descriptor_limit();

// The files that all pools sharing this object keep open, closed least recently used first.
class OpenFiles {
 public:
  explicit OpenFiles(Index most) : most_(most) {}
  // Returns the object for this process. Its capacity is half of the descriptor limit at the first call.
  static OpenFiles& of_process();

 private:
  friend class FilePool;
  struct Use;
  using Uses = std::list<Use>;
  struct Pool {
    std::unordered_map<std::string, Uses::iterator> files;                // by path
    std::unordered_map<std::string, std::shared_ptr<const File>> pinned;  // by name
    File::Reads reads = File::Reads::kInOrder;
  };
  struct Use {
    Pool* pool;
    std::string path;
    std::shared_ptr<const File> file;
  };
  void make_room();  // for one more file, unless all are pinned

  const Index most_;
  std::mutex mutex_;
  Index pinned_ = 0;
  Uses uses_;  // unpinned files, most recently used first
};

// Opens files on demand and keeps the most recently used ones open. Thread-safe. Copies share the same pool.
class FilePool {
 public:
  explicit FilePool(File::Access access = File::Access::kRead, OpenFiles& all = OpenFiles::of_process())
      : state_(std::make_shared<State>(access, all)) {}
  // The file stays open while the caller holds the pointer, even after the pool has dropped it.
  Result<std::shared_ptr<const File>> open(const std::string& path);
  // Applies File::expect() to all files of this pool, including those opened later.
  void expect(File::Reads reads);
  // Adds an open file under a name that the caller chooses. The pool never closes it while the pool lives.
  void pin(const std::string& name, File file);

 private:
  struct State {
    State(File::Access access_to_files, OpenFiles& all_files) : access(access_to_files), all(all_files) {}
    ~State();
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    const File::Access access;
    OpenFiles& all;
    OpenFiles::Pool files;  // guarded by all.mutex_
  };
  std::shared_ptr<State> state_;
};

}  // namespace reshard
