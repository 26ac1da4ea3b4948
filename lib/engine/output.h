// The output directory, or file, while it is being made.
//
// Everything is written into a work directory beside the destination, `DST.partial`, under the files' final names; the
// finished directory (of a target that is a file: the file in it) is moved to its name in one step. Until then the
// destination does not exist (or is the old one), so nothing half-written ever looks finished. A killed run leaves the
// work directory, which the next run to the same destination recognises by its marker file, reports and removes.
//
// Of a job of several ranks, rank 0 makes the directory, seals the files and moves them; every rank writes its part of
// the data into them and forces it to disk.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/checkpoint/format.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/engine/crc_ledger.h"
#include "lib/transport/transport.h"

namespace reshard {

// Where an output goes, and what may make room for it.
struct OutputPath {
  std::string path;
  // The files of the checkpoint that a directory is, relative to it; an error where it is none. Given, an existing
  // destination is replaced if it is empty, or holds these files and nothing else. Null: there must be none.
  std::function<Result<std::vector<std::string>>(const std::string& directory)> files_of_checkpoint = nullptr;
  std::vector<std::string> inputs = {};  // files and directories that the job reads: what holds one is not replaced
};

class Output {
 public:
  // Whether the files' blocks are reserved at once, or only their lengths set (for headers without data).
  enum class Space { kReserved, kSparse };

  // Makes the work directory and all of the target's files at their full length. An existing destination that may not
  // be replaced is a usage error. Refers to `target` and `ranks`, each of which calls it.
  static Result<std::unique_ptr<Output>> create(OutputPath destination, Target& target, Space space = Space::kReserved,
                                                Transport* ranks = nullptr);
  // Removes the work directory, unless committed.
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Whether create() found and removed what a killed run had left.
  bool removed_leftover() const { return removed_leftover_; }

  // Writes the elements of `box`, row-major in `data`, to where `fragments` (all of them, with their index) says. The
  // fragments may be a rewritten view of the target's own. `scratch` is the caller's memory: page-aligned, a page
  // longer than `data`. Thread-safe.
  Status write(const FragmentList& fragments, const FragmentIndex& index, const Box& box, Index element_bytes,
               Bytes data, MutableBytes scratch);

  // Adds a file of its own to the directory, or to the file that the output is. For rank 0.
  Status add_file(const std::string& name, std::string_view contents);

  // Writes what surrounds the data, forces everything to disk, and moves the directory to its name. Only what create()
  // saw there is replaced: where something else has come meanwhile, that is an error which says where the output is.
  // After an error the destination is what it was before, unless the message says otherwise. Every rank calls it.
  Status commit();

 private:
  // A destination that is to be replaced, as it was when that was decided.
  struct Old {
    Node self;
    std::vector<Node> inside;  // of a directory
    friend bool operator==(const Old&, const Old&) = default;
  };

  Output(OutputPath destination, Target& target, Transport* ranks);
  Status prepare(Space space);
  Status clear_leftover();
  Status flush();
  Status seal();
  Status publish();
  Status publish_file();
  static Result<Old> old_at(const std::string& path);
  Result<Old> replaceable() const;
  Result<std::vector<std::string>> foreign_files(const Old& old) const;
  Status check_holds_no_input(const std::string& path) const;
  Result<bool> take_place(const std::string& made);
  Error keep_finished(const Error& error);
  Status remove_old();
  Status encode(Index offset, Bytes bytes);
  Status put(std::uint32_t file, Index offset, Bytes bytes, MutableBytes scratch);
  std::string file_path(std::uint32_t file) const;

  OutputPath to_;
  std::string destination_;  // its path
  std::string work_;
  Target& target_;
  std::optional<Old> old_;  // what is replaced
  Transport* ranks_;
  bool removed_leftover_ = false;
  bool made_work_ = false;
  int lock_ = -1;  // descriptor of the work directory, locked while this run lives
  FilePool files_{256, File::Access::kReadWrite};
  // The same files past the page cache: large outputs are written at the disk's speed and need no long flush at the
  // end.
  FilePool direct_files_{256, File::Access::kWriteDirect};
  std::atomic<bool> direct_{true};  // until the file system refuses
  CrcLedger crcs_;
  std::vector<std::atomic<bool>> written_;  // files this rank has written to
};

}  // namespace reshard
