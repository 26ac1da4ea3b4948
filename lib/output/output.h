// The output directory, or file, while it is being made.
//
// Everything is written into a work directory next to the destination, `DST.partial`, under the files' final names; the
// finished directory (of a target that is a file: the file in it) is moved to its name in one step. Until then the
// destination does not exist (or is the old one), so nothing half-written ever looks finished. A killed run leaves the
// work directory, which the next run to the same destination recognises by its marker file. The marker is also a
// journal (journal.h) of what is finished: the next run resumes from there if it makes the same output of the same
// source and finds what was finished unchanged (finished_check.h), and otherwise starts over. An error leaves the
// directory only if a run can resume from it.
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
#include "lib/output/encoded_chunks.h"
#include "lib/output/journal.h"
#include "lib/output/old_output.h"
#include "lib/output/small_write_buffer.h"
#include "lib/output/work_directory.h"
#include "lib/source/crc_ledger.h"
#include "lib/source/pieces.h"
#include "lib/transport/transport.h"

namespace reshard {

// How an output is continued that an earlier run has begun.
enum class Resume {
  kAuto,     // where that can be; else what it left is removed
  kNever,    // what it left is removed
  kRequire,  // an error where it cannot be
};
struct Continuation {
  Resume resume = Resume::kAuto;
  std::string facts;                     // what the output's bytes depend on (journal.h)
  Index group_bytes = Index{128} << 20;  // of the source, for each entry of the journal
  std::function<void(const std::string& note)> tell =
      nullptr;  // what has become of what an earlier run left; on rank 0
};

class Output {
 public:
  // Whether the files' blocks are reserved at once, or only their lengths set (for headers without data).
  enum class Space { kReserved, kSparse };

  // Makes the work directory and all of the target's files at their full length. An existing destination that may not
  // be replaced is a usage error. Refers to `target` and `ranks`, each of which calls it. `continuation` is for a
  // target that does not encode; without, there is no journal, and what an earlier run left is removed.
  static Result<std::unique_ptr<Output>> create(OutputPath destination, Target& target, Space space = Space::kReserved,
                                                Transport* ranks = nullptr,
                                                std::optional<Continuation> continuation = std::nullopt);
  // Removes the work directory, unless committed, kept by give_up(), or an earlier run's.
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  // Whether create() found and removed what a killed run had left.
  bool removed_leftover() const { return removed_leftover_; }

  // Writes the elements of `box`, row-major in `data`, to where `fragments` (all of them, with their index) says. The
  // fragments may be a rewritten view of the target's own. `scratch` is the caller's memory: page-aligned, a page
  // longer than `data`. Adds to `sums` what is known of checksums. False: some of it stays in memory until commit()
  // (small_write_buffer.h), so that the journal is not to be told of it. Thread-safe.
  Result<bool> write(const FragmentList& fragments, const FragmentIndex& index, const Box& box, Index element_bytes,
                     Bytes data, MutableBytes scratch, std::vector<CrcPiece>* sums = nullptr);

  // Whether each tensor has to be written by one rank.
  bool keeps_tensors_whole() const { return target_.encodes(); }

  // By every rank, after its last write(): what is encoded has its place then.
  Status finish_data() { return chunks_ ? chunks_->finish() : Status(); }

  // This rank's; null: none. What is finished of the output is told to it.
  Journal* journal() const { return journal_.get(); }
  // What earlier runs have finished; on rank 0, null elsewhere and where there is nothing.
  const JournalText* continued() const { return continued_ ? &*continued_ : nullptr; }
  // Forgets what earlier runs have finished, because of `why`: everything is written anew. A usage error with
  // Resume::kRequire. Every rank calls it, before its first write().
  Status start_over(const std::string& why);

  // Reads back what the files hold of `box`; the arguments are those of write(). Calls visit(piece, its first element)
  // for each piece, while its bytes are in `scratch`, with the strides of the piece. Thread-safe. Not for a target that
  // encodes.
  using VisitStored = std::function<void(const Piece& piece, const std::byte* first)>;
  Status read(const FragmentList& fragments, const FragmentIndex& index, const Box& box, Index element_bytes,
              MutableBytes scratch, const VisitStored& visit);

  // Adds a file of its own to the directory, or to the file that the output is. For rank 0.
  Status add_file(const std::string& name, std::string_view contents);
  // The same of a text that is told in parts; held whole only where the output is a file.
  using EmitText = std::function<void(std::string_view part)>;
  Status add_text(const std::string& name, const std::function<void(const EmitText& emit)>& tell);

  // Writes what surrounds the data, forces everything to disk, and moves the directory to its name. Only what create()
  // saw there is replaced: where something else has come meanwhile, that is an error which says where the output is.
  // After an error the destination is what it was before, unless the message says otherwise. Every rank calls it.
  Status commit();

  // After an error of the job. Where a later run can go on from what is finished, which is a group at least, the work
  // directory is kept, and the error says so. Not after errors that the next run would meet again.
  Error give_up(const Error& error);

  // Bytes that an earlier run has reserved in the work directory of this destination; 0 where there is none.
  static Index held_by_leftover(const std::string& destination);

 private:
  Output(OutputPath destination, Target& target, Transport* ranks, std::optional<Continuation> continuation);
  Status prepare(Space space);
  void make_journal();
  Status take_leftover();
  Status sync_written();
  Status write_held();
  Status flush();
  Status seal();
  Status publish();
  Status move_aside(const std::string& made);
  Result<bool> take_place(const std::string& made);
  Error keep_finished(const std::string& made, const Error& error);
  Status remove_old(const std::string& made);
  const std::string& around() const { return target_.is_file() ? work_ : publishing_; }
  void make_chunks();
  Status encode(Index offset, Bytes bytes);
  Status put(std::uint32_t file, Index offset, Bytes bytes, MutableBytes scratch);
  std::string file_path(std::uint32_t file) const;

  OutputPath to_;
  std::string destination_;  // its path
  std::string work_;
  std::string publishing_;  // where a finished directory is on its way to its name
  Target& target_;
  std::optional<OldOutput> old_;  // what is replaced
  std::optional<Continuation> continuation_;
  std::optional<JournalText> continued_;
  Index journal_length_ = 0;  // that rank 0's begins with
  std::unique_ptr<Journal> journal_;
  Transport* ranks_;
  bool removed_leftover_ = false;
  bool made_work_ = false, made_publishing_ = false;
  std::optional<DirectoryLock> lock_, publishing_lock_;  // of the two, while this run lives
  FilePool files_{File::Access::kReadWrite};
  // The same files past the page cache: large outputs are written at the disk's speed and need no long flush at the
  // end.
  FilePool direct_files_{File::Access::kWriteDirect};
  std::atomic<bool> direct_{true};  // until the file system refuses
  CrcLedger crcs_;
  SmallWriteBuffer held_;
  std::unique_ptr<EncodedChunks> chunks_;    // of a target that encodes
  std::vector<std::atomic<bool>> written_;   // files this rank has written to
  std::vector<std::atomic<bool>> unsynced_;  // likewise, since they were last forced to disk
  bool directories_synced_ = false;
};

}  // namespace reshard
