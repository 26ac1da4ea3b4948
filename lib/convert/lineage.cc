#include "lib/convert/lineage.h"

#include <map>

#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

Result<std::vector<std::string>> texts(const Json* list) {
  std::vector<std::string> out;
  if (list == nullptr) return out;
  const std::span<const Json> items = TRY(list->as_array());
  for (const Json& item : items) out.emplace_back(TRY(item.as_string()));
  return out;
}

Result<RecordedMerge> read(const Json& manifest, const Json& merge) {
  RecordedMerge out;
  out.expression = TRY(merge.get_string("expression"));
  out.accumulate = TRY(merge.get_string("accumulate"));
  if (merge.contains("others_from")) out.others_from = TRY(merge.get_string("others_from"));
  const Json* const sources = merge.find("sources");
  if (sources == nullptr) return corrupt("expected a list 'sources'");
  const std::span<const Json> items = TRY(sources->as_array());
  for (const Json& item : items) {
    RecordedMerge::Source source;
    source.name = TRY(item.get_string("name"));
    source.path = TRY(item.get_string("path"));
    out.sources.push_back(std::move(source));
  }
  const Json* const options = manifest.find("options");
  const Json* const filters = options ? options->find("filters") : nullptr;
  if (filters == nullptr) return corrupt("expected the options that it was made with");
  out.to = TRY(options->get_string("to"));
  out.dtype = TRY(options->get_string("dtype"));
  out.include = TRY(texts(filters->find("include")));
  out.exclude = TRY(texts(filters->find("exclude")));
  out.keep_dtype = TRY(texts(filters->find("keep_dtype")));
  return out;
}

std::string digest_of(const Json* tensor) {
  const auto digest = tensor ? tensor->get_string("digest") : Result<std::string_view>(corrupt("none"));
  return digest ? std::string(*digest) : std::string("none");
}

// Of each source; none where they are not recorded.
std::vector<std::string> merged_digests(const Json* tensor) {
  const auto digests =
      tensor ? texts(tensor->find("merged_digests")) : Result<std::vector<std::string>>(corrupt("none"));
  return digests ? *digests : std::vector<std::string>();
}

}  // namespace

Result<RecordedMerge> recorded_merge(const Json& manifest, const std::string& path) {
  const Json* const merge = manifest.find("merge");
  if (merge == nullptr)
    return usage_error(path + ": records no merge: --lineage is for what reshard merge has written");
  return read(manifest, *merge).context(path);
}

std::vector<Finding> compare_lineage(const RecordedMerge& merge, const Json& recorded, const Json& again) {
  std::map<std::size_t, std::vector<std::string>> changed;  // tensors by source
  std::vector<std::string> others;
  for (const auto* side : {&recorded, &again}) {
    const Json* const tensors = side->find("tensors");
    if (tensors == nullptr || !tensors->is_object()) continue;
    const Json* const before = recorded.find("tensors");
    const Json* const now = again.find("tensors");
    const std::span<const Json::Member> members = *tensors->as_object();
    for (const Json::Member& member : members) {
      const Json* const a = before ? before->find(member.key) : nullptr;
      const Json* const b = now ? now->find(member.key) : nullptr;
      if (side == &again && a != nullptr) continue;  // seen from the other side
      const auto was = merged_digests(a), is = merged_digests(b);
      bool is_named = false;
      for (std::size_t s = 0; s < merge.sources.size() && s < was.size() && s < is.size(); ++s) {
        if (was[s] == is[s]) continue;
        changed[s].push_back(member.key);
        is_named = true;
      }
      if (!is_named && digest_of(a) != digest_of(b)) others.push_back(member.key);
    }
  }
  std::vector<Finding> out;
  for (auto& [s, tensors] : changed)
    out.push_back(
        {Severity::kError,
         "lineage-source",
         std::move(tensors),
         "source " + merge.sources[s].name + ", " + printable(merge.sources[s].path) + ", is another than was merged",
         {},
         "",
         "Merge again, or find the checkpoint that was there."});
  if (!others.empty())
    out.push_back({Severity::kError,
                   "lineage",
                   std::move(others),
                   "the merge of the same sources gives something else",
                   {},
                   "",
                   "The manifest was changed, or another version of reshard wrote it."});
  return out;
}

}  // namespace reshard
