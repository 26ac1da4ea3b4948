// Fuzzes the journal: it lists disjoint slabs or nothing, and is equal after writing and reading it.
#include <cstddef>
#include <cstdint>

#include "lib/output/journal.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::journal_fuzz {

FUZZ_TARGET(journal)(const std::uint8_t* data, std::size_t size) {
  const auto text = read_journal(input_file(data, size));
  require(text.has_value());
  if (!*text) return 0;
  const FinishedSlabs& finished = (*text)->finished;
  Index end = -1;
  for (const auto& [first, count] : finished.slabs) {
    require(first > end && count > 0);
    end = first + count;
  }
  (void)changed_facts((*text)->facts, (*text)->facts);

  static const File again = *File::create_in_memory();
  require(again.set_length(0).has_value());
  require(write_journal(again, **text).has_value());
  const auto same = read_journal(again);
  require(same.has_value() && same->has_value());
  require((*same)->cut == (*text)->cut && (*same)->facts == (*text)->facts);
  require((*same)->finished.slabs == finished.slabs && (*same)->finished.digests == finished.digests);
  require((*same)->finished.bytes == finished.bytes && (*same)->finished.read.size() == finished.read.size());
  return 0;
}

}  // namespace reshard::journal_fuzz
