// SPDX-License-Identifier: Apache-2.0
// The base of readers of checkpoints that consist of files of named tensors (formats/encoding/tensor_file.h). It opens
// the files and adds whole tensors and other values to the catalog.
#pragma once

#include <deque>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "formats/encoding/pickle.h"
#include "formats/encoding/tensor_file.h"
#include "lib/base/json.h"
#include "lib/base/trouble.h"
#include "lib/checkpoint/format.h"

namespace reshard {

// Returns "1,024 tensors: 'a', 'b', 'c' and 1,021 more".
std::string names_text(const std::vector<std::string>& names, std::string_view noun);

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

  // Records that a file could not be read, with its tensors if they are known. Returns `error` if `options` do not
  // allow that, or if a device or a server may be the cause; `watch` was created before the file was opened.
  Status leave_out(const OpenOptions& options, const TroubleWatch& watch, const Error& error,
                   std::vector<std::string> tensors = {});

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
  std::vector<std::unique_ptr<const TensorFile>> open_;
  std::deque<pickle::Document> documents_;                 // values that are in no open file
  std::unordered_map<std::string, pickle::Value> values_;  // by blob
  std::set<std::string> disputed_;                         // keys of header metadata
};

}  // namespace reshard
