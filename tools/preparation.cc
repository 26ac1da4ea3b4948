// SPDX-License-Identifier: Apache-2.0
#include "tools/preparation.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "formats/open.h"
#include "formats/pickle_allowlist.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/memory_limit.h"
#include "lib/base/text.h"

namespace reshard::tools {
namespace {

// " --allow cover --allow config"
std::string allow_text(const std::set<Problem>& problems) {
  std::string out;
  for (const Choice<Problem>& choice : problem_choices())
    if (problems.contains(choice.value)) out += " --allow " + choice.word;
  return out;
}

// Adds to an error what --allow cover would leave out and still write, if that is anything.
Error with_way_out(const Error& error, ConvertOptions options, OpenOptions how) {
  const bool files_too = std::exchange(how.files_too, false);
  how.validated = false;
  const auto open = open_checkpoint(options.source, how);
  const auto faulty = open ? std::ssize(tensor_faults(open->reader->catalog(), true)) : 0;
  for (const Problem more : {Problem::kCover, Problem::kConfig}) {
    if (faulty == 0) break;
    options.allow.insert(more);
    const auto rest = prepare(options, !files_too);
    if (!rest || rest->target->write_view) continue;
    return {error.code(), error.message() + ";" + allow_text(options.allow) + " would leave out " +
                              count_of(faulty, "tensor") + " with faults and write the other " +
                              with_commas(std::ssize(rest->conversion->plan().tensors))};
  }
  return error;
}

// `allow_faults`: also opens a checkpoint whose tensors are incomplete or stored twice.
Result<OpenCheckpoint> open_source(const ConvertOptions& options, OpenOptions how, bool allow_faults) {
  how.validated = !allow_faults;
  const IoFailureWatch watch;
  auto open = open_checkpoint(options.source, how);
  if (open || watch.may_be_io_failure(open.error())) return open;
  if (!allow_faults) return with_way_out(open.error(), options, how);
  how.files_too = false;
  return open_checkpoint(options.source, how);
}

}  // namespace

Result<PreparedConversion> open_sources(const ConvertOptions& options, bool files_too) {
  PreparedConversion p;
  p.options = TRY(options.conversion_options());
  p.target = TRY(find_format(options.to));
  ConversionOptions& o = p.options;
  const auto layout = TRY(options.source_layout.load());
  OpenOptions how;
  how.files_too = files_too;
  how.keys = TRY(options.source_layout.keys());
  how.keys.as_stored = o.model.is_none();
  o.naming.changed_names = !how.keys.model_prefix.empty() || !how.keys.renames.empty();
  how.layout = layout ? &*layout : nullptr;
  how.weights = TRY(options.source_layout.which_weights());
  how.own_family = o.model.families.own();
  how.config = o.config_path;
  how.external_too = options.allow.contains(Problem::kExternal);
  p.allows_objects = options.allow.contains(Problem::kObjects);
  p.source = TRY(open_source(options, how, o.allow.cover));
  if (!options.donor.empty()) {
    p.donor = TRY(open_checkpoint(options.donor, {.own_family = how.own_family}));
    o.donor = p.donor->reader.get();
  }
  if (!options.adapter.empty()) {
    p.adapter = TRY(open_checkpoint(options.adapter, {.own_family = how.own_family}));
    o.adapter.reader = p.adapter->reader.get();
  }
  if (options.merge) {
    if (p.target->write_view)
      return usage_error("--to " + options.to + " refers to stored tensors and cannot merge; choose another format");
    if (o.selection.part.empty()) o.selection.part = "model";
    o.merge = options.merge;
    p.merged = TRY(open_others(*o.merge, *p.source.reader, open_checkpoint, how));
    o.naming.common_rows = true;
  }
  return p;
}

Status prepare_again(PreparedConversion& p, PlanOf of) {
  if (p.conversion) {
    p.conversion.reset();
    release_freed_memory();
  }
  p.options.sizes_only = of == PlanOf::kSizes;
  p.options.metadata_only = of != PlanOf::kData;
  p.conversion = TRY(Conversion::prepare(*p.source.reader, *p.target, p.options));
  // Other formats encode objects again, so no pickle is copied.
  if (p.target->lay_out && p.target->holds == StateSupport::kEverything && of == PlanOf::kData && !p.allows_objects)
    TRY(check_inert(*p.source.reader, p.conversion->source_view().blobs));
  return {};
}

Result<PreparedConversion> prepare(const ConvertOptions& options, bool metadata_only) {
  PreparedConversion p = TRY(open_sources(options, !metadata_only));
  TRY(prepare_again(p, metadata_only ? PlanOf::kMetadata : PlanOf::kData));
  return p;
}

}  // namespace reshard::tools
