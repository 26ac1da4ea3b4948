// SPDX-License-Identifier: Apache-2.0
// The journal records which slabs of an output are durably on disk, so that a later run can resume where a killed one
// ended.
//
// Every rank has a journal in the work directory (output.h). Finished slabs are collected in groups. To close a group,
// the journal takes these steps, while other threads already fill the next group:
// 1. All slabs of the group have been written to their files, and their digests are known.
// 2. fdatasync every output file written since the last group. From now on the data survives a crash.
// 3. Append one entry for the group to the journal: its slabs, digests and checksums, with a length and a CRC.
// 4. fdatasync the journal. Only now may the entry of the next group be written.
// A crash between these steps loses time, never correctness:
//    - Before step 4 the entry may be missing or partly written, because the file system may write its blocks in any
//      order. Its length or CRC is then wrong, and the reader stops there: the group is copied again.
//    - An intact entry implies that step 2 succeeded, so its slabs are on disk. If the sync of step 2 or 4 fails, the
//      kernel may have dropped pages of any file. The journal then writes no further entries.
//    - At most two groups are open, one filling and one being closed, so a crash loses at most two.
// A run that resumes reads the journals of all ranks, and uses them if the facts that determine the output's bytes are
// unchanged. It first replaces them by a single journal: it writes that under another name, syncs it, renames it over
// rank 0's, and then removes the others. If it is killed in between, slabs are recorded in two journals, and the second
// record is ignored. Before it copies anything, it reads the finished slabs back and compares their digests
// (finished_check.h).
//
//     journal    first entry*                          all numbers little-endian
//     entry      length: u32, crc: u32, payload        crc: CRC-32 of the length's bytes and the payload
//     first      as an entry; payload: "reshard 1\n", usual: u64, limit: u64, facts: text to the end
//     payload    bytes: u64,
//                n: u32, n of (slab: u64, count: u64),
//                n: u32, n of (item: u64, source: digest, target: digest),
//                n: u32, n of sum                      of source data that was read
//                n: u32, n of sum                      of output data that was written
//     digest     4 of u32
//     sum        extent_file: u32, extent_offset: u64, extent_length: u64,
//                begin: u64, length: u64, crc: u32     crc: of bytes [begin, begin + length) of the extent
//
// A truncated or damaged entry, or one that records a slab a second time, ends a journal: it and the entries after it
// are ignored.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lib/base/file.h"
#include "lib/device/digest.h"
#include "lib/source/crc_ledger.h"

namespace reshard {

// How tensors are divided into slabs (SlabList), in bytes. A resuming run must use the same values.
struct SlabCut {
  Index usual = 0, limit = 0;
  friend bool operator==(const SlabCut&, const SlabCut&) = default;
};

// Finished slabs, with their digests and checksums.
struct FinishedSlabs {
  Index bytes = 0;               // size of the slabs in the source
  std::map<Index, Index> slabs;  // first slab of a run -> number of slabs; adjacent runs are joined
  struct Digests {
    Digest source, target;
    friend bool operator==(const Digests&, const Digests&) = default;
  };
  std::map<Index, Digests> digests;     // by item
  std::vector<CrcPiece> read, written;  // known checksums of the source and of the output

  // Merges `more`. Returns false and changes nothing if a slab is in both.
  bool add(const FinishedSlabs& more);
  void add_run(Index first, Index count);  // the slabs must be new
};

// The contents of a journal.
struct JournalText {
  SlabCut cut;
  std::string facts;  // what the output's bytes depend on: a JSON object of strings
  FinishedSlabs finished;
};
// Reads a journal. Nothing if it has no valid first entry. Fails if the file cannot be read.
Result<std::optional<JournalText>> read_journal(const File& file);
// Writes a journal with this content to an empty file and syncs it. Returns its length.
Result<Index> write_journal(const File& file, const JournalText& text);

// Returns the names of the facts that differ.
Result<std::vector<std::string>> changed_facts(const std::string& before, const std::string& now);

// A rank's journal while it is written. Thread-safe.
class Journal {
 public:
  // `open` returns the file when the first entry is written; entries are appended at `length`. `sync_data` makes
  // everything written to the output durable. A group is closed when it has `group_bytes` of the source, or kEntries
  // tensors and checksums.
  Journal(std::function<Result<File>()> open, Index length, std::string facts, Index group_bytes,
          std::function<Status()> sync_data);

  static constexpr Index kEntries = Index{1} << 15;
  static constexpr Index kEntryBytes = 256;  // most memory per tensor or checksum

  // Sets how slabs are cut, and a function that returns the source checksums seen since its last call. Call before
  // add().
  void begin(SlabCut cut, std::function<std::vector<CrcPiece>()> take_read);

  // Records that a slab was written, with the checksums of what was written. Closes the group if it is full, and blocks
  // if the previous one is still being closed.
  Status add(Index slab, Index item, Index bytes, const FinishedSlabs::Digests& digests,
             const std::vector<CrcPiece>& written);

  // Closes the open group. Does nothing after an error or after stop().
  Status close_group();
  // Stops closing groups, because the caller takes over syncing and a failed sync would go unnoticed here.
  void stop();

  // Returns the source bytes that this rank's entries record as finished.
  Index bytes() const;

 private:
  bool is_due() const;
  Status close(std::unique_lock<std::mutex>& lock);
  Status write(FinishedSlabs group);

  const std::function<Result<File>()> open_;
  const std::function<Status()> sync_data_;
  const std::string facts_;
  const Index group_bytes_;
  SlabCut cut_;
  std::function<std::vector<CrcPiece>()> take_read_;
  std::optional<File> file_;
  Index length_;
  mutable std::mutex mutex_;
  std::condition_variable closed_;
  bool closing_ = false, stopped_ = false;
  FinishedSlabs group_;
  Index bytes_ = 0;
};

}  // namespace reshard
