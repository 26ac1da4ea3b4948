// SPDX-License-Identifier: Apache-2.0
// The base of readers of checkpoints that consist of files of named tensors (formats/encoding/tensor_file.h). It opens
// the files and adds whole tensors and other values to the catalog.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "formats/encoding/pickle.h"
#include "formats/encoding/tensor_file.h"
#include "formats/tensor_files/indexed_files.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/json.h"
#include "lib/base/parallel.h"
#include "lib/checkpoint/format.h"

namespace reshard {

// Returns "5 files ('a', 'b' and 3 more)", where `first` are the first of `count` files.
std::string files_text(const std::vector<std::string>& first, Index count);

class TensorFileReader : public Reader {
 public:
  Status locate(const std::vector<std::size_t>&, int, const std::string&) override { return {}; }
  Result<std::string> blob_bytes(const Blob& blob) override;
  std::string describe(const Blob& blob) override;

 protected:
  struct OpenFile {
    std::uint32_t file = 0;               // an index into the catalog's files
    const TensorFile* content = nullptr;  // valid as long as the reader
  };
  // Opens the file `name` below the catalog's root, reads which tensors it holds, and appends it to the catalog's
  // files.
  Result<OpenFile> open_file(const std::string& name, const OpenOptions& options,
                             TensorFile::Parts parts = TensorFile::Parts::kRefuse);

  // Opens a file like open_file(). If it cannot be read, adds it to the catalog's unread_files and returns nothing, so
  // that the reader continues and finds further such files.
  Result<std::optional<OpenFile>> open_if_whole(const std::string& name, const OpenOptions& options,
                                                TensorFile::Parts parts = TensorFile::Parts::kRefuse);
  // Reads such files in parallel with `read`, which gets an open file and its number in the catalog, and appends all of
  // them to the catalog's files in this order. The content of a file that cannot be read is nothing.
  template <class T>
  Result<std::vector<std::optional<T>>> read_files(const std::vector<std::string>& names,
                                                   const std::function<Result<T>(const File&, std::uint32_t)>& read);
  // Returns whether the file itself caused the error: it is damaged, unsupported, missing or not readable. False for
  // errors of a device or a server, and for a lack of memory or of descriptors. `watch` was created before the file was
  // opened.
  static bool is_of_file(const Error& error, const IoFailureWatch& watch);
  // Records that a file could not be read, with its tensors if they are known. Returns `error` unless is_of_file().
  Status leave_out(const IoFailureWatch& watch, const Error& error, std::vector<std::string> tensors = {});
  // Once a file could not be read: tries those of `names` that were not opened, so that all damaged files are known.
  Status find_more_damaged(const std::vector<std::string>& names);
  // Records a tensor that the files read lack: any of the files that could not be read may have it or a part of it.
  void leave_out_tensor(const std::string& name);
  bool is_partial() const { return !catalog_.unread_files.empty(); }
  // Compares the files that were read with their index. A file that lacks tensors becomes one of the unread files. If a
  // file is missing and others have its tensors, its error says so; `unnamed` are files that the index does not name.
  Status check_index(const IndexedFiles& index, const std::vector<std::string>& unnamed);

  // Adds a tensor that is stored in one piece. Fails with kCorrupt if the name is already used.
  Status add_tensor(const std::string& name, KeyPath path, std::uint32_t file, const StoredTensor& stored);
  // Returns the fragment with its file set.
  static Fragment in_file(const StoredTensor& stored, std::uint32_t file);
  // Adds a value of a file that open_file() opened. Fails with kCorrupt if the name is already used.
  Status add_object(const std::string& name, KeyPath path, std::uint32_t file, pickle::Value value);
  // Adds a value given as a pickle.
  Status add_pickled(const std::string& name, KeyPath path, std::uint32_t file, std::string pickle);
  // Adds a value given as JSON.
  Status add_json(const std::string& name, KeyPath path, std::uint32_t file, const Json& value);

  // Returns the bytes that blob_bytes() returns for a value given as JSON.
  static Result<std::string> json_item(const Json& value);

  // Adds to the catalog what a safetensors header says beyond its tensors (Catalog::header_metadata), except what
  // Distributed Checkpoint and ColossalAI say of the file. Lists, such as torchao's of names, of several files are
  // joined. If two files give one key different values, the catalog has neither and a note.
  void add_header_metadata(const SafetensorsMetadata& metadata);

  // Finishes opening: sorts tensors naturally, checks if storages are shared, and runs validate() if requested.
  Status finish(const OpenOptions& options);

 private:
  std::string file_with(const std::vector<std::string>& tensors, const std::vector<std::string>& files);

  std::vector<std::unique_ptr<const TensorFile>> open_;
  std::deque<pickle::Document> documents_;                 // values that are in no open file
  std::unordered_map<std::string, pickle::Value> values_;  // by blob
  std::set<std::string> tried_;                            // files that were opened, if only in vain
  std::set<std::string> disputed_;                         // keys of header metadata
};

template <class T>
Result<std::vector<std::optional<T>>> TensorFileReader::read_files(
    const std::vector<std::string>& names, const std::function<Result<T>(const File&, std::uint32_t)>& read) {
  const auto base = static_cast<std::uint32_t>(catalog_.files.size());
  const IoFailureWatch watch;
  std::vector<std::optional<Result<T>>> contents(names.size());
  std::vector<Index> sizes(names.size(), -1);
  tried_.insert(names.begin(), names.end());
  TRY(parallel_for(std::ssize(names), thread_count(0), [&](int, Index i) -> Status {
    const std::size_t k = i;
    contents[k] = [&]() -> Result<T> {
      const auto file = TRY(files_.open(path_join(catalog_.root, names[k])));
      sizes[k] = TRY(file->size());
      return read(*file, base + static_cast<std::uint32_t>(k));
    }();
    return contents[k]->has_value() || !watch.may_be_io_failure(contents[k]->error()) ? Status() : contents[k]->error();
  }));
  std::vector<std::optional<T>> out;
  for (std::size_t i = 0; i < names.size(); ++i) {
    catalog_.files.push_back({names[i], sizes[i]});
    out.emplace_back();
    if (contents[i]->has_value())
      out.back() = **std::move(contents[i]);
    else
      TRY(leave_out(watch, contents[i]->error()));
  }
  return out;
}

}  // namespace reshard
