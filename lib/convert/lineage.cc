// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/lineage.h"

#include <map>
#include <utility>

#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/convert/conversion.h"

namespace reshard {
namespace {

Result<std::vector<std::string>> texts(const Json* list) {
  std::vector<std::string> out;
  if (list == nullptr) return out;
  const std::span<const Json> items = TRY(list->as_array());
  for (const Json& item : items) out.emplace_back(TRY(item.as_string()));
  return out;
}

Status read(const Json& json, RecordedMerge& out) {
  out.merge.expression = TRY(json.get_string("expression"));
  out.merge.in_double = TRY(json.get_string("accumulate")) == "float64";
  if (json.contains("others_from")) out.merge.others_from = TRY(json.get_string("others_from"));
  const Json* const sources = json.find("sources");
  if (sources == nullptr) return corrupt("expected a list 'sources'");
  const std::span<const Json> items = TRY(sources->as_array());
  for (const Json& item : items) {
    MergeSource source;
    source.name = TRY(item.get_string("name"));
    source.path = TRY(item.get_string("path"));
    out.merge.sources.push_back(std::move(source));
  }
  if (out.merge.sources.empty()) return corrupt("expected at least one source");
  const Json* const options = out.manifest.find("options");
  const Json* const filters = options ? options->find("filters") : nullptr;
  if (filters == nullptr) return corrupt("expected the options of the merge");
  out.to = TRY(options->get_string("to"));
  if (const std::string_view dtype = TRY(options->get_string("dtype")); dtype != "keep") {
    out.typing.dtype = dtype_from_torch(dtype);
    if (!out.typing.dtype) return corrupt("dtype: expected keep or a torch dtype, got '" + printable(dtype) + "'");
  }
  out.selection.part = "model";
  out.selection.include = TRY(texts(filters->find("include")));
  out.selection.exclude = TRY(texts(filters->find("exclude")));
  out.typing.keep_dtype = TRY(texts(filters->find("keep_dtype")));
  return {};
}

// Compares a recorded merge with `again`, the manifest of the same merge computed now.
std::vector<Finding> compare_lineage(const RecordedMerge& merge, const Json& again) {
  const Json& recorded = merge.manifest;
  const std::vector<MergeSource>& sources = merge.merge.sources;
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
      if (side == &again && a != nullptr) continue;  // reported with the roles exchanged
      const auto was = merged_digests(a), is = merged_digests(b);
      bool is_named = false;
      for (std::size_t s = 0; s < sources.size() && s < was.size() && s < is.size(); ++s) {
        if (was[s] == is[s]) continue;
        changed[s].push_back(member.key);
        is_named = true;
      }
      if (!is_named && recorded_digest(a) != recorded_digest(b)) others.push_back(member.key);
    }
  }
  std::vector<Finding> out;
  for (auto& [s, tensors] : changed)
    out.push_back(
        {Severity::kError,
         "lineage-source",
         std::move(tensors),
         "source " + sources[s].name + ", " + printable(sources[s].path) + ", differs from the source that was merged",
         {},
         "",
         "Merge again, or restore the checkpoint that was there."});
  if (!others.empty())
    out.push_back({Severity::kError,
                   "lineage",
                   std::move(others),
                   "merging the same sources gives other values",
                   {},
                   "",
                   "The manifest was edited, or written by another version of reshard."});
  return out;
}

}  // namespace

std::string recorded_digest(const Json* tensor) {
  const auto digest = tensor ? tensor->get_string("digest") : Result<std::string_view>(corrupt("none"));
  return digest ? std::string(*digest) : std::string("none");
}

std::vector<std::string> merged_digests(const Json* tensor) {
  const auto digests =
      tensor ? texts(tensor->find("merged_digests")) : Result<std::vector<std::string>>(corrupt("none"));
  return digests ? *digests : std::vector<std::string>();
}

Result<RecordedMerge> recorded_merge(Reader& checkpoint) {
  RecordedMerge out;
  out.path = path_join(checkpoint.catalog().root, kManifestFile);
  const auto text = TRY(checkpoint.side_file(std::string(kManifestFile), kMaxManifestBytes));
  if (!text) return io_error(out.path + ": not found: --lineage needs the manifest that reshard merge has written");
  out.manifest = TRY(parse_json(*text, out.path));
  const Json* const merge = out.manifest.find("merge");
  if (merge == nullptr) return usage_error(out.path + ": records no merge; --lineage needs an output of reshard merge");
  TRY(read(*merge, out).context(out.path));
  return out;
}

Status RecordedMerge::move(std::string_view name, const std::string& directory) {
  std::vector<std::string> names;
  for (MergeSource& source : merge.sources) {
    if (source.name == name) {
      source.path = directory;
      return {};
    }
    names.push_back(source.name + " (" + printable(source.path) + ")");
  }
  return usage_error(path + ": --source '" + printable(name) +
                     "': expected NAME=DIR with one of these names: " + join(names, ", "));
}

Result<Lineage> check_lineage(const RecordedMerge& recorded, const Opener& open, const Format& format,
                              const ModelChoice& choice, const std::string& config_path, const std::string& spool,
                              const RunOptions& run) {
  MergeOptions merge = recorded.merge;
  merge.applies_deltas = merge.sources.front().name == kDeltaBase && merge.expression.find('^') != std::string::npos;
  for (const MergeSource& source : merge.sources)
    if (!TRY(path_exists(source.path)))
      return io_error(recorded.path + ": source " + source.name + ", " + source.path +
                      ": not found; if it was moved, add --source " + source.name + "=DIR");
  const OpenOptions how{.own_family = choice.families.own()};
  const OpenCheckpoint first = TRY(open(merge.sources.front().path, how).context(recorded.path));
  const auto others = TRY(open_others(merge, *first.reader, open, how).context(recorded.path));
  ConversionOptions o;
  o.selection = recorded.selection;
  o.typing = recorded.typing;
  o.naming.common_rows = true;
  o.model = choice;
  o.source_path = merge.sources.front().path;
  o.config_path = config_path;
  o.spool = spool;
  o.merge = std::move(merge);
  o.run = run;
  const auto conversion = TRY(Conversion::prepare(*first.reader, format, std::move(o)).context(recorded.path));
  const Json again = TRY(parse_json(TRY(conversion->manifest_text(run)), recorded.path));
  return Lineage{std::ssize(conversion->plan().tensors), compare_lineage(recorded, again)};
}

}  // namespace reshard
