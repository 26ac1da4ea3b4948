// reshard inspect: what a checkpoint holds and how it lies, from its metadata.
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
  const Inspection in = TRY(look_at(options.path, options.source_layout));
  NotedInputs inputs;
  inputs.add(in.catalog());
  TRY(inputs.check(options.html));
  if (options.json) {
    print_json(in, options.report);
  } else {
    print_text(in, options.report);
  }
  if (!options.html.empty()) TRY(write_html(options.html, "inspect", page_json(in, options.report)));
  return problems(in).empty() ? 0 : static_cast<int>(ErrorCode::kCorrupt);
}

}  // namespace

void add_inspect(CommandLine& line) {
  auto options = std::make_shared<InspectOptions>();
  line.add_option("path", options->path, "The checkpoint: a directory or a file").read().required();
  line.add_flag("--json", options->json, "Everything as JSON; docs/cli.md describes it");
  add_html_option(line, options->html);
  line.add_flag("--shards", options->report.shards, "Each box of each tensor: its file, offset and length");
  line.add_option("--filter", options->report.filters, "Only tensors whose name matches the glob, one a line")
      .one_value_each()
      .names_tensors();
  options->source_layout.add(line);
  line.footer(
      "Only the metadata is read, so it works on a copy of them without the data.\n"
      "Examples:\n"
      "  reshard inspect step-1000\n"
      "  reshard inspect step-1000 --filter 'layers.0.*' --shards\n"
      "  reshard inspect step-1000 --json | jq '.mesh.axes'\n"
      "  reshard inspect step-1000 --html step-1000.html             to look at in a browser\n"
      "Exit codes: 0 fine, 3 files are cut short or some are missing, 5 not found or I/O.");
  line.action([options] { return inspect(*options); });
}

}  // namespace reshard::tools
