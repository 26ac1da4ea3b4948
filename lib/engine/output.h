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
#include <memory>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/checkpoint/format.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/engine/crc_ledger.h"
#include "lib/transport/transport.h"

namespace reshard {

class Output {
 public:
  // Whether the files' blocks are reserved at once, or only their lengths set (for headers without data).
  enum class Space { kReserved, kSparse };

  // Makes the work directory and all of the target's files at their full length. `replace` allows an existing
  // destination, if it is a checkpoint or empty; without it that is a usage error. Refers to `target` and `ranks`, each
  // of which calls it.
  static Result<std::unique_ptr<Output>> create(const std::string& destination, Target& target, bool replace,
                                                Space space = Space::kReserved, Transport* ranks = nullptr);
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

  // Writes what surrounds the data, forces everything to disk, and moves the directory to its name. After an error the
  // destination is what it was before, unless the message says otherwise. Every rank calls it.
  Status commit();

 private:
  Output(std::string destination, Target& target, bool replace, Transport* ranks);
  Status prepare(Space space);
  Status clear_leftover();
  Status flush();
  Status seal();
  Status publish();
  Status publish_file();
  Result<bool> may_replace() const;
  Status encode(Index offset, Bytes bytes);
  Status put(std::uint32_t file, Index offset, Bytes bytes, MutableBytes scratch);
  std::string file_path(std::uint32_t file) const;

  std::string destination_;
  std::string work_;
  Target& target_;
  bool replace_;
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
