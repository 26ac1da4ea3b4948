// The directory in which an output is made, DST.partial, and what a killed run has left there.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/format.h"
#include "lib/engine/journal.h"

namespace reshard {

// The file by which a work directory is known as one of ours, and the journal of rank 0; those of other ranks have
// their number after it.
inline constexpr std::string_view kMarker = ".reshard-partial";

// Names of the other ranks' journals.
std::vector<std::string> journals_of_ranks(const std::string& work);

// What is finished for good of the target's files; otherwise why a run whose output depends on `facts` (journal.h)
// cannot go on with what is there.
struct Leftover {
  std::optional<JournalText> finished;
  std::string why_not;
};
Result<Leftover> read_leftover(const std::string& work, const Target& target, const std::string& facts);

// Removes what was written when everything was finished: it is written again.
Status remove_what_is_not_data(const std::string& work, const Target& target);

// Puts one journal in the place of those of all ranks of the run that is continued. Its length, bytes.
Result<Index> join_journals(const std::string& work, const JournalText& text);

// Removes a work directory. The marker goes last, when the rest is gone for good: a run that is killed meanwhile, or
// loses its power, leaves something that the next one knows.
Status remove_work(const std::string& work);
// The same of one that holds nothing but the marker.
Status remove_marked(const std::string& work);

}  // namespace reshard
