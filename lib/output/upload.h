// SPDX-License-Identifier: Apache-2.0
// An output that is written to a bucket: nothing is staged on disk.
//
//   1. create() decides what may be replaced, as for local outputs (old_output.h), begins an upload in parts for each
//      file, or finds those of a killed run, and records them in a journal, the object DST.partial/.reshard-partial or
//      a local file (OutputPath::state).
//   2. send() computes the parts, several at a time, and uploads them. All uploads stay invisible. A part that a killed
//      run has uploaded is computed again and is not sent if its ETag is the MD5 of the same bytes: so whatever has
//      changed in between, the output is that of this run. Each of several ranks sends its share of the parts.
//   3. publish(), on rank 0, removes the old checkpoint, completes the uploads, writes the other files in their order
//      (the metadata last), compares sizes and ETags with those that the store lists, and removes the journal.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lib/base/storage/object_writer.h"
#include "lib/base/storage/read_ahead.h"
#include "lib/base/storage/url.h"
#include "lib/output/old_output.h"
#include "lib/output/output.h"
#include "lib/transport/transport.h"

namespace reshard {

// A file of the output. Its bytes can be computed in any order.
struct UploadFile {
  std::string path;  // relative to the destination; empty: the destination itself is the file
  Index size = 0;
  bool holds_tensors = false;  // false: written when all others are complete
};

class Upload {
 public:
  struct Options {
    std::string facts = {};  // what the output's bytes depend on
    Resume resume = Resume::kAuto;
    std::function<void(const std::string& note)> on_note = nullptr;
    const std::atomic<bool>* interrupt = nullptr;
    int workers = 1;
    bool reads_ahead = false;  // the source is behind a URL, too
    // The ranks that share the work; null: this process alone. Rank 0 makes every decision and all requests but those
    // that send parts. `facts`, `resume`, `on_note` and `is_own_file` of the others are not used.
    Transport* ranks = nullptr;
    bool divides_files = true;  // whether several ranks may send parts of one file
    // Returns whether an existing object may be replaced by an output that is one file. Null: none may.
    std::function<Result<bool>(const std::string& url)> is_own_file = nullptr;
  };
  // Returns the size of the parts of an output, which a resumed run must not change.
  static Index part_bytes(const std::vector<UploadFile>& files);
  static Index part_bytes(const Catalog& output);
  // Divides the memory that a run may still take: as many workers as fit into a part of it, and the bytes that they
  // take.
  struct Memory {
    int workers = 1;
    Index bytes = 0;
  };
  static Memory plan_memory(Index left, Index part_bytes, bool reads_ahead);

  // `to.path` is the URL. Fails with a usage error if an existing destination may not be replaced.
  static Result<std::unique_ptr<Upload>> create(OutputPath to, std::vector<UploadFile> files, Options options);
  // Drops the uploads, unless the output was published or kept by give_up().
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // When a range of a file may be read.
  enum class Turn {
    kAnyTime,
    kAfterItsFile,  // after the other ranges of its file
    kLast,          // after all others
  };
  // The source of the bytes. Thread-safe.
  struct Source {
    std::function<Status(std::uint32_t file, Index offset, MutableBytes out)> read;
    // Returns the turn of a range. Null: any time for all.
    std::function<Turn(std::uint32_t file, Index offset, Index length)> turn = nullptr;
    // Adds the ranges that read() will request from files behind URLs. Null: none.
    std::function<void(std::uint32_t file, Index offset, Index length, std::vector<FileRange>& out)> expect = nullptr;
  };
  // Uploads this rank's share of the files that hold tensors, except parts of the last turn. `progress` receives its
  // bytes that are done.
  Status send(const Source& source, const std::function<void(Index bytes)>& progress);
  // Returns whether this rank's share contains the part with this byte of a file. Parts of the last turn count as well.
  bool is_mine(std::uint32_t file, Index offset) const;
  // Uploads the rest and makes everything visible. All ranks must call it, after send() was successful on each. The
  // message of an error says what is visible then.
  Status publish(const Source& source);

  // Call after an error. Aborts the uploads, and names in the error those that it could not abort. Keeps them if the
  // program was interrupted or publish() has begun: then the next run resumes.
  Error give_up(const Error& error);

 private:
  struct Part {
    std::uint32_t file = 0;
    int number = 0;  // from 1
    Index offset = 0, length = 0;
    Turn turn = Turn::kAnyTime;
  };
  // The upload of a file in parts.
  struct Parts {
    std::string id;                      // empty: the object was completed by a killed run
    std::vector<StoredPart> known = {};  // uploaded by a killed run
    std::vector<std::string> etags = {};
  };
  struct Journal {
    std::string facts;
    Index part_bytes = 0;
    bool is_publishing = false;
    std::vector<std::string> replaced;                      // files of an old checkpoint, which are removed
    std::vector<std::pair<UploadFile, std::string>> files;  // and their uploads' ids
  };
  Upload(OutputPath to, std::vector<UploadFile> files, Options options, ObjectWriter& writer);
  std::string key_of(const UploadFile& file) const;
  std::string url_of(const std::string& key) const { return url_.root + "/" + key; }
  std::string journal_path() const;
  std::string uploads_place() const;
  Status remove_journal();
  Result<std::optional<Journal>> read_journal() const;
  Status write_journal(bool is_publishing);
  Status look_at_destination(const std::optional<Journal>& left);
  Result<std::string> why_not(const Journal& left) const;
  Status take_up(const Journal& left);
  Status drop(const Journal& left);
  Status prepare();
  Status begin();
  Status share_uploads();
  Status gather_etags();
  std::vector<Part> parts_of(const Source& source) const;
  static std::vector<Part>::const_iterator first_of_last_turn(const std::vector<Part>& parts);
  Status send_part(const Part& part, Bytes bytes);
  Status send_parts(std::span<const Part> parts, const Source& source, const std::function<void(Index bytes)>& report);
  Status make_visible(const Source& source);
  Status find_replaced();
  Status remove_replaced();
  Status complete(std::uint32_t file);
  Status put(std::uint32_t file, const Source& source);
  Status check_listed();
  std::vector<std::string> abort_all();

  OutputPath to_;
  const Url url_;
  std::vector<UploadFile> files_;
  Options options_;
  ObjectWriter& writer_;
  const Index part_bytes_;
  std::vector<std::optional<Parts>> uploads_;  // of each file; nothing for those written at the end
  std::vector<std::string> etags_;             // of finished objects, as far as they are known
  std::vector<Index> begins_;                  // bytes with tensors in earlier files, of each file; then of all
  std::optional<OldOutput> old_;
  std::vector<std::string> replaced_;  // names in the destination
  bool is_begun_ = false, is_publishing_ = false, is_kept_ = false;
};

}  // namespace reshard
