// SPDX-License-Identifier: Apache-2.0
// Line charts of HTML reports as inline SVG, which needs no script.
#pragma once

#include <limits>
#include <string>
#include <vector>

namespace reshard::tools {

inline constexpr double kNoValue = std::numeric_limits<double>::quiet_NaN();

struct LineChart {
  struct Line {
    std::string name;
    std::vector<double> values;  // one for each of `steps`; what is not finite is a gap
  };
  std::string label;               // what the values are, for people who do not see the chart
  std::vector<std::string> steps;  // along the x axis, at equal distances
  std::vector<Line> lines;
};

// Returns the attributes of SVG that give line `i` its colour and dashes. The first 32 differ, and a line and the next
// have colours that are far apart. Every colour has a contrast of 3:1 on light and dark pages.
std::string line_style(std::size_t i);

// Returns a figure with the chart and its scale, which is logarithmic if the values span more than a factor of 50; zero
// is then drawn at the bottom. Hovering over a line shows its name. Of many lines it draws the kMostLines that reach
// highest, and says so. Returns nothing if no value is above zero.
inline constexpr std::size_t kMostLines = 64;
std::string line_chart_html(const LineChart& chart);

}  // namespace reshard::tools
