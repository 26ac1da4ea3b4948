// SPDX-License-Identifier: Apache-2.0
// An output directory (or file) while it is being written.
//
// Everything is written into a work directory next to the destination, `DST.partial`, under the final file names. The
// finished directory (or its single file) is moved to the destination in one step. Until then the destination does not
// exist, or is the old one, so incomplete output never looks finished. A killed run leaves the work directory, which
// the next run to the same destination recognises by its marker file. The marker is also a journal (journal.h): the
// next run resumes from it if it makes the same output from the same source and finds the finished part unchanged
// (finished_check.h); otherwise it starts over. After an error the directory is kept only if a run can resume from it.
//
// In a job of several ranks, rank 0 creates the directory, seals the files and moves them; every rank writes and syncs
// its own part of the data.
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
#include "lib/output/encoded_chunks.h"
#include "lib/output/file_gaps.h"
#include "lib/output/journal.h"
#include "lib/output/old_output.h"
#include "lib/output/small_write_buffer.h"
#include "lib/output/work_directory.h"
#include "lib/source/crc_ledger.h"
#include "lib/source/pieces.h"
#include "lib/transport/transport.h"

namespace reshard {

// Whether to resume the output of an earlier run.
enum class Resume {
  kAuto,     // resume if possible, otherwise remove the leftover
  kNever,    // remove the leftover
  kRequire,  // fail if resuming is impossible
};
struct ResumeOptions {
  Resume resume = Resume::kAuto;
  std::string facts;                     // what the output's bytes depend on (journal.h)
  Index group_bytes = Index{128} << 20;  // source bytes per journal entry
  // Receives what became of an earlier run's leftover; on rank 0.
  std::function<void(const std::string& note)> on_note = nullptr;
};

class Output {
 public:
  // Whether to reserve the files' blocks, or only set their lengths (for headers without data).
  enum class Space { kReserved, kSparse };

  // Creates the work directory and all of the target's files at their full length. Fails with a usage error if an
  // existing destination may not be replaced. Every rank must call it. `target` and `ranks` must outlive the output.
  // Without `resume_options` there is no journal, and the leftover of an earlier run is removed; a target that encodes
  // does not support one.
  static Result<std::unique_ptr<Output>> create(OutputPath destination, Target& target, Space space = Space::kReserved,
                                                Transport* ranks = nullptr,
                                                std::optional<ResumeOptions> resume_options = std::nullopt);
  // Removes the work directory, unless it was committed, kept by give_up(), or left by an earlier run.
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Returns whether create() removed the leftover of a killed run.
  bool removed_leftover() const { return removed_leftover_; }

  // Writes the row-major elements of `box` in `data` to the places given by `fragments` (with their complete index),
  // which may be a rewritten view of the target's own. `scratch` is the caller's memory: page-aligned, and one page
  // longer than `data`. Adds known checksums to `sums`. Returns false if some data stays in memory until commit()
  // (small_write_buffer.h), so that the slab must not be added to the journal. Thread-safe.
  Result<bool> write(const FragmentList& fragments, const FragmentIndex& index, const Box& box, Index element_bytes,
                     Bytes data, MutableBytes scratch, std::vector<CrcPiece>* sums = nullptr);

  // Returns whether all of a tensor must be written by one rank.
  bool keeps_tensors_whole() const { return target_.encoder() != nullptr; }

  // Assigns offsets to encoded data. Every rank must call it after its last write().
  Status finish_data() { return chunks_ ? chunks_->finish() : Status(); }

  // Returns this rank's journal, or null. The caller adds finished slabs to it.
  Journal* journal() const { return journal_.get(); }
  // Returns what earlier runs have finished, on rank 0; null on others or if there is nothing.
  const JournalText* earlier_work() const { return earlier_work_ ? &*earlier_work_ : nullptr; }
  // Discards what earlier runs have finished, for the reason `why`, so that everything is written again. A usage error
  // with Resume::kRequire. Every rank must call it, before its first write().
  Status start_over(const std::string& why);

  // Reads `box` back from the files; the arguments are those of write(). Calls visit(piece, its first element) for each
  // piece while its bytes are in `scratch`, laid out with the strides of the piece. Thread-safe. Not for a target that
  // encodes.
  using VisitStored = std::function<void(const Piece& piece, const std::byte* first)>;
  Status read(const FragmentList& fragments, const FragmentIndex& index, const Box& box, Index element_bytes,
              MutableBytes scratch, const VisitStored& visit);

  // Adds a side file to the directory, or into the single output file. For rank 0.
  Status add_file(const std::string& name, std::string_view contents);
  // Adds a side file whose text is produced in parts. The whole text is in memory only if the output is a single file.
  using EmitText = std::function<void(std::string_view part)>;
  Status add_text(const std::string& name, const std::function<void(const EmitText& emit)>& write_text);

  // Completes the output: writes what surrounds the data, syncs everything, and moves the directory to the destination.
  // Replaces only what create() saw there; if something else has appeared, fails and says where the output is. After an
  // error the destination is unchanged, unless the message says otherwise. Every rank must call it.
  Status commit();

  // Call after an error of the job. If a later run can resume (at least one group is finished) and would not fail in
  // the same way, keeps the work directory and adds that to the error.
  Error give_up(const Error& error);

  // Returns the bytes that an earlier run has reserved in the work directory of this destination, 0 if there is none.
  static Result<Index> held_by_leftover(const std::string& destination);

 private:
  class BoxWriter;
  Output(OutputPath destination, Target& target, Transport* ranks, std::optional<ResumeOptions> resume_options);
  Status prepare(Space space);
  void make_journal();
  Status take_leftover();
  Status sync_written();
  Status write_held();
  Status flush();
  Status seal();
  Status clear_gaps(FileGaps& gaps);
  Status publish();
  Status move_aside(const std::string& made);
  Result<bool> take_place(const std::string& made);
  Error keep_finished(const std::string& made, const Error& error);
  Status remove_old(const std::string& made);
  // Returns the directory that contains the finished output with the marker next to it.
  const std::string& marked_directory() const { return target_.single_file() ? work_ : publishing_; }
  void make_chunks();
  Status encode(Index offset, Bytes bytes);
  Status put(std::uint32_t file, Index offset, Bytes bytes, MutableBytes scratch);
  std::string file_path(std::uint32_t file) const;

  OutputPath to_;
  std::string destination_;  // to_.path
  std::string work_;
  std::string publishing_;  // where a finished directory is before it is renamed
  Target& target_;
  std::optional<OldOutput> old_;  // what will be replaced
  std::optional<ResumeOptions> resume_options_;
  std::optional<JournalText> earlier_work_;  // what earlier runs have finished; on rank 0
  Index journal_length_ = 0;                 // initial length of rank 0's journal
  std::unique_ptr<Journal> journal_;
  Transport* ranks_;
  bool removed_leftover_ = false;
  bool has_old_files_ = false;  // whether its files are those of a killed run
  bool made_work_ = false, made_publishing_ = false;
  std::optional<DirectoryLock> lock_, publishing_lock_;  // locks of work_ and publishing_
  FilePool files_{File::Access::kReadWrite};
  // The same files opened for direct I/O: large outputs are written at the disk's speed, without a long flush at the
  // end.
  FilePool direct_files_{File::Access::kWriteDirect};
  std::atomic<bool> direct_{true};  // false once the file system has refused
  CrcLedger crcs_;
  SmallWriteBuffer held_;
  std::unique_ptr<EncodedChunks> chunks_;    // for a target that encodes
  std::vector<std::atomic<bool>> written_;   // files this rank has written to
  std::vector<std::atomic<bool>> unsynced_;  // files this rank has written to since the last sync
  bool directories_synced_ = false;
};

}  // namespace reshard
