// What of an output is on the disk for good: the record that lets a later run go on where a killed one ended.
//
// Every rank has a journal in the work directory (output.h). It grows by an entry for each group of slabs, written when
// the group's data are forced to disk, and is forced to disk itself before the next. A run that goes on where others
// ended begins with one journal that says what all of theirs say.
//
//     journal    first entry*                          all numbers little-endian
//     entry      length: u32, crc: u32, payload        crc: CRC-32 of the length's bytes and the payload
//     first      as an entry; payload: "reshard 1\n", usual: u64, limit: u64, facts: text to the end
//     payload    bytes: u64,
//                n: u32, n of (slab: u64, count: u64),
//                n: u32, n of (item: u64, source: digest, target: digest),
//                n: u32, n of sum, of what was read,
//                n: u32, n of sum, of what was written
//     digest     4 of u32
//     sum        file: u32, offset: u64, length: u64, begin: u64, length: u64, crc: u32
//
// What is cut off, damaged, or says of a slab for a second time that it is finished ends a journal: that entry and
// those after it count for nothing.
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

// How slabs are cut (SlabList): bytes.
struct SlabCut {
  Index usual = 0, limit = 0;
  friend bool operator==(const SlabCut&, const SlabCut&) = default;
};

// Slabs that are finished, and what was seen of them.
struct FinishedSlabs {
  Index bytes = 0;               // of the source
  std::map<Index, Index> slabs;  // by the first of a run, how many; neighbours are joined
  struct Digests {
    Digest source, target;
    friend bool operator==(const Digests&, const Digests&) = default;
  };
  std::map<Index, Digests> digests;     // by item
  std::vector<CrcPiece> read, written;  // what is known of checksums, of the source and of the output

  // False, and nothing changed, where a slab is in both.
  bool add(const FinishedSlabs& more);
  void add_run(Index first, Index count);  // of slabs that are not in it
};

// What a journal says.
struct JournalText {
  SlabCut cut;
  std::string facts;  // what the output's bytes depend on, a JSON object of texts
  FinishedSlabs finished;
};
// Nothing where there is no first entry. An error where the file cannot be read.
Result<std::optional<JournalText>> read_journal(const File& file);
// Writes a journal that says this, and forces it to disk. The file is empty. Returns its length.
Result<Index> write_journal(const File& file, const JournalText& text);

// The names of those facts that are not the same in both.
Result<std::vector<std::string>> changed_facts(const std::string& before, const std::string& now);

// A rank's journal while it grows. Thread-safe.
class Journal {
 public:
  // `open` gives the file when the first entry is to be written, to grow from `length` on; `sync_data` forces to disk
  // what was written to the output. A group is closed when it has `group_bytes` of the source, or kEntries of tensors
  // and sums of what was written, and while that goes on another fills, no more: twice as much is lost at most.
  Journal(std::function<Result<File>()> open, Index length, std::string facts, Index group_bytes,
          std::function<Status()> sync_data);

  static constexpr Index kEntries = Index{1} << 15;
  static constexpr Index kEntryBytes = 256;  // of memory that one of them takes, or a sum of what was read

  // How slabs are cut; and what gives the checksums of the source that were seen since it was last called.
  void begin(SlabCut cut, std::function<std::vector<CrcPiece>()> take_read);

  // A slab is where it belongs; `written` are the sums of what was written of it. Closes the group where it is due.
  Status add(Index slab, Index item, Index bytes, const FinishedSlabs::Digests& digests,
             const std::vector<CrcPiece>& written);

  // Closes the group that was begun. Does nothing after an error, or after stop().
  Status close_group();
  // No group is closed from now on: what is forced to disk is no longer known here.
  void stop();

  // Bytes of the source that are finished for good, by the entries that this rank wrote.
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
