"""What the papers prove or measure, as functions: bounds, limits and exact versions of what training estimates.

One file per topic: ``information`` (the bounds on mutual information of Ring), ``gradients`` (the exact loss over a
data set, and how far a method's gradient is from its gradient), ``chains`` (the bounds of EMC2, and the two
propositions of ProSampler), ``worst_case`` (the limits of HCL) and ``class_prior`` (estimates of tau_plus). A function
checks the assumptions of its theorem and reports whether they hold, or raises where no value is defined without them.
"""

from hardneg.theory.chains import EMC2Bounds as EMC2Bounds
from hardneg.theory.chains import Escape as Escape
from hardneg.theory.chains import closest_neighbour_probability as closest_neighbour_probability
from hardneg.theory.chains import contraction as contraction
from hardneg.theory.chains import escape as escape
from hardneg.theory.chains import transition_matrix as transition_matrix
from hardneg.theory.class_prior import ClassPrior as ClassPrior
from hardneg.theory.class_prior import tau_plus_of_classes as tau_plus_of_classes
from hardneg.theory.class_prior import tau_plus_of_labels as tau_plus_of_labels
from hardneg.theory.class_prior import tau_plus_of_pairs as tau_plus_of_pairs
from hardneg.theory.gradients import GradientError as GradientError
from hardneg.theory.gradients import global_loss as global_loss
from hardneg.theory.gradients import gradient_error as gradient_error
from hardneg.theory.information import MutualInformation as MutualInformation
from hardneg.theory.information import mutual_information as mutual_information
from hardneg.theory.information import theorem_3_1_premise as theorem_3_1_premise
from hardneg.theory.information import variance_over_draws as variance_over_draws
from hardneg.theory.worst_case import Packing as Packing
from hardneg.theory.worst_case import PositiveVariance as PositiveVariance
from hardneg.theory.worst_case import ball_packing as ball_packing
from hardneg.theory.worst_case import nearest_neighbour_risk as nearest_neighbour_risk
from hardneg.theory.worst_case import positive_variance as positive_variance
from hardneg.theory.worst_case import tilt_gap_bound as tilt_gap_bound
from hardneg.theory.worst_case import worst_case_loss as worst_case_loss
