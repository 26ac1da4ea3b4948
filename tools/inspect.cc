// SPDX-License-Identifier: Apache-2.0
// reshard inspect: shows what a checkpoint contains, from its metadata.
#include <cstdio>

#include "tools/commands.h"
#include "tools/html_report.h"
#include "tools/inspect_report.h"
#include "tools/inspection.h"
#include "tools/job_options.h"
#include "tools/outputs.h"

namespace reshard::tools {
namespace {

struct InspectOptions {
  std::string path, html;
  bool json = false;
  ReportOptions report;
  SourceOptions source_layout;
};

Result<int> inspect(const InspectOptions& options) {
  const Inspection in = TRY(look_at(options.path, options.source_layout, true));
  NotedInputs inputs;
  inputs.add(options.path, in.catalog());
  TRY(inputs.check(options.html));
  if (options.json) {
    print_json(in, options.report);
  } else {
    print_text(in, options.report);
  }
  if (!options.html.empty()) TRY(write_html(options.html, "inspect", inputs.facts(), page_json(in, options.report)));
  return problems(in).empty() ? 0 : static_cast<int>(ErrorCode::kCorrupt);
}

}  // namespace

void add_inspect(CommandLine& line) {
  auto options = std::make_shared<InspectOptions>();
  line.add_option("PATH", options->path, "Checkpoint to inspect: a directory or a file").read().required();
  line.group("Report");
  line.add_flag("--json", options->json, "Print everything as JSON (schema: docs/cli.md)").common();
  add_html_option(line, options->html);
  line.add_flag("--shards", options->report.shards, "List the file, offset and length of each shard").common();
  line.add_option("--filter", options->report.filters, "List tensors whose names match, one per line")
      .common()
      .names_tensors();
  options->source_layout.add(line);
  line.examples({{"reshard inspect step-1000", ""},
                 {"reshard inspect step-1000 --filter 'layers.0.*' --shards", ""},
                 {"reshard inspect step-1000 --json | jq .mesh.axes", ""},
                 {"reshard inspect step-1000 --html report.html", "a page for the browser"}});
  line.description(
      "Only metadata is read; the data files may be missing. Exits with 3 if files are missing, unreadable or cut "
      "short.");
  line.action([options] { return inspect(*options); });
}

}  // namespace reshard::tools
