#include "lib/engine/work_directory.h"

#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/sys.h"
#include "lib/base/text.h"

namespace reshard {

std::vector<std::string> journals_of_ranks(const std::string& work) {
  std::vector<std::string> out;
  const std::string prefix = std::string(kMarker) + ".";
  const auto entries = list_directory(work);
  for (std::size_t i = 0; entries && i < entries->size(); ++i)
    if (const DirectoryEntry& e = (*entries)[i]; !e.is_directory && e.name.starts_with(prefix)) out.push_back(e.name);
  return out;
}

Result<Leftover> read_leftover(const std::string& work, const Target& target, const std::string& facts) {
  const std::string marker = path_join(work, kMarker);
  const auto file = path_exists(marker) ? File::open(marker) : Result<File>(io_error("none"));
  std::optional<JournalText> text;
  if (file) text = TRY(read_journal(*file));
  // Rank 0 may have been killed before any of its slabs was finished for good.
  for (const std::string& name : journals_of_ranks(work)) {
    const auto other = File::open(path_join(work, name));
    if (!other) continue;
    std::optional<JournalText> more = TRY(read_journal(*other));
    if (!more) continue;
    if (!text)
      text = std::move(more);
    else if (text->cut == more->cut && text->facts == more->facts)
      (void)text->finished.add(more->finished);
  }
  if (!text || text->finished.slabs.empty()) return Leftover{std::nullopt, "nothing of it was finished for good"};
  const auto changed = changed_facts(text->facts, facts);
  if (!changed) return Leftover{std::nullopt, "its journal is damaged"};
  if (!changed->empty()) return Leftover{std::nullopt, "not the same as then: " + some_of(*changed, 5)};
  for (const CatalogFile& f : target.catalog().files) {
    const std::string path = path_join(work, f.path);
    const auto node = look_at(path);
    if (!node || !node->is_regular() || node->size < f.size)
      return Leftover{std::nullopt, path + " is missing or too short"};
  }
  return Leftover{std::move(text), {}};
}

Status remove_what_is_not_data(const std::string& work, const Target& target) {
  std::set<std::string> data;
  for (const CatalogFile& f : target.catalog().files) data.insert(f.path);
  for (const Node& node : TRY(walk(work)))
    if (!node.is_directory() && !data.contains(node.name) && !node.name.starts_with(kMarker))
      TRY(remove_file(path_join(work, node.name)));
  for (const CatalogFile& f : target.catalog().files) {
    const std::string path = path_join(work, f.path);
    if (TRY(look_at(path)).size > f.size) TRY(TRY(File::open(path, File::Access::kReadWrite)).set_length(f.size));
  }
  return {};
}

Result<Index> join_journals(const std::string& work, const JournalText& text) {
  Index length = 0;
  const std::string marker = path_join(work, kMarker), next = marker + ".next";
  if (path_exists(next)) TRY(remove_file(next));
  {
    const File file = TRY(File::create(next));
    length = TRY(write_journal(file, text));
  }
  if (sys().rename(next.c_str(), marker.c_str(), 0) != 0)
    return io_error(marker + ": cannot replace: " + std::strerror(errno));
  for (const std::string& name : journals_of_ranks(work)) TRY(remove_file(path_join(work, name)));
  TRY(sync_directory(work));
  return length;
}

Status remove_marked(const std::string& work) {
  TRY(sync_directory(work));
  const std::string marker = path_join(work, kMarker);
  if (path_exists(marker)) TRY(remove_file(marker));
  return remove_directory(work);
}

Status remove_work(const std::string& work) {
  for (const Node& node : TRY(walk(work))) {
    if (node.name == kMarker || node.name.find('/') != std::string::npos) continue;
    const std::string inner = path_join(work, node.name);
    TRY(node.is_directory() ? remove_tree(inner) : remove_file(inner));
  }
  return remove_marked(work);
}

}  // namespace reshard
