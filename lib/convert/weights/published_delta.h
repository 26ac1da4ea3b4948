// SPDX-License-Identifier: Apache-2.0
// Deltas that trainers publish for inference servers (slime, miles, SGLang's /pull_weights): for each tensor that
// changed, what changed and a checksum of its new bytes. They record no dtypes and shapes, which are those of the model
// that they change. What changed is encoded in one of two ways (slime/utils/disk_delta.py):
//
//   xor         the exclusive or of the old and new bytes
//   overwrite   u32 count; u32 positions[count], increasing; u8 new_bytes[count]
//
// Their format opens one as flat tensors of bytes with Catalog::delta_of set, and gives these facts: attributes
// "version", "base_version", "delta_encoding", "compression_format" and "checksum_format", and the checksums under the
// tensors' names in Catalog::header_metadata.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/engine/run_options.h"

namespace reshard {

// A published delta as a checkpoint of all tensors of its base. Those that did not change are zeros.
class PublishedDelta : public Reader {
 public:
  static bool is_one(const Catalog& catalog);
  // `before` are the model before the first delta, under the names of Hugging Face, and the deltas between it and this
  // one. All must outlive the result. Fails (unsupported) if the encoding or the checksum is unknown, or if the model
  // lacks a tensor or has it in another size.
  static Result<std::unique_ptr<Reader>> open(std::unique_ptr<Reader> stored, std::vector<Reader*> before);

  const std::string& version() const { return version_; }
  const std::string& base_version() const { return base_version_; }
  // Returns the checksum of a tensor's new bytes, or an empty text if the delta does not change it.
  std::string checksum(const std::string& tensor) const;
  const std::string& checksum_format() const { return checksum_format_; }

  Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) override;
  Result<std::string> blob_bytes(const Blob& blob) override;
  Result<std::optional<std::string>> side_file(const std::string& name, Index limit) override;
  Result<std::optional<std::string>> side_file_start(const std::string& name, Index length) override;
  std::string describe(const Blob& blob) override;

 private:
  PublishedDelta(std::unique_ptr<Reader> stored, std::vector<Reader*> before);
  Status read_facts();
  Status take_tensors();
  Status check_size(const Tensor& change, const Tensor& old) const;
  // Adds an unnamed file to the catalog, with this name there. Creates it in `spool` at the first call.
  Result<std::uint32_t> add_file(const std::string& name, const std::string& spool, Index bytes);
  Status locate_before(const std::string& tensor, int threads, const std::string& spool) const;
  // Writes the exclusive or of the old and new bytes of a tensor that `change` overwrites, at `offset`.
  Status write_difference(const Tensor& old, const Tensor& change, const File& to, Index offset);

  std::unique_ptr<Reader> stored_;
  std::vector<Reader*> before_;
  Reader& base_;  // the first of them
  std::string version_, base_version_, checksum_format_;
  std::map<std::string, std::string> checksums_;  // by tensor
  bool overwrites_ = false;                       // its encoding
  std::set<std::string> added_;                   // files that exist, by name in the catalog
  Index zeros_bytes_ = 0;                         // of an empty file as long as the largest unchanged tensor
  std::map<std::string, Index> differences_;      // of overwritten tensors, their offset in a file, by name
  Index differences_bytes_ = 0;                   // its length
};

// Applies the deltas, published and others, to the bytes of `base`, and fails (unsupported) if a tensor then has
// another checksum than the last published delta that changed it records: one of them was made from another model, or
// is damaged. Reads all of both.
Status check_published(Reader& base, std::span<Reader* const> deltas, const RunOptions& run);

}  // namespace reshard
